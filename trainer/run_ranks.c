// SPDX-License-Identifier: Apache-2.0
// Comparing the ranks of a run; see run_ranks.h.
// What is compared is text, a fact a line, so that the first difference can be shown.
#include "trainer/run_ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "engine/digest.h"
#include "engine/files.h"

enum { FACTS = 1024, NAME = 64 };

eng_status trn_ranks_agree_program(trn_ranks *ranks, const trn_run_config *config, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX], *text = NULL;
    if (!ranks)
        return ENG_OK;
    eng_status status = eng_digest_file("/proc/self/exe", digest, error);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, hex);
    status = trn_ranks_agree(ranks, "build", hex, error);
    if (status == ENG_OK)
        status = trn_run_config_text(config, &text, error);
    if (status == ENG_OK)
        status = trn_ranks_agree(ranks, "configuration", text, error);
    free(text);
    return status;
}

static eng_status describe_data(const char *name, const trn_dataset *data, char *text, size_t size, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX];
    text[0] = '\0';
    if (!data)
        return ENG_OK;
    eng_status status = trn_dataset_digest(data, digest, error);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, hex);
    snprintf(text, size, "%s: %lld documents, %lld rows, %.16s\n", name, (long long)trn_dataset_documents(data),
             (long long)trn_dataset_rows(data), hex);
    return ENG_OK;
}

eng_status trn_ranks_agree_run(const trn_run *run, eng_error *error) {
    char train[FACTS], valid[FACTS], facts[3 * FACTS], *text = NULL;
    if (!run->ranks)
        return ENG_OK;
    eng_status status = describe_data("data.train", run->train, train, sizeof train, error);
    if (status == ENG_OK)
        status = describe_data("data.valid", run->valid, valid, sizeof valid, error);
    if (status != ENG_OK)
        return status;
    snprintf(facts, sizeof facts, "%s%s", train, valid);
    status = trn_ranks_agree(run->ranks, "data set", facts, error);
    if (status == ENG_OK)
        status = trn_ranks_agree(run->ranks, "teacher", run->teacher.digest, error);
    if (status == ENG_OK)
        status = trn_ranks_agree(run->ranks, "device", kern_device_describe(run->device)->numeric_profile, error);
    if (status == ENG_OK)
        status = trn_run_config_text(&run->config, &text, error);
    if (status == ENG_OK)
        status = trn_ranks_agree(run->ranks, "model", text, error);
    free(text);
    return status;
}

// Every rank looks for the file, whose name nobody has asked for before, while rank 0 keeps it there.
static eng_status look_for(trn_ranks *ranks, const char *folder, const char *path, eng_error *error) {
    char seen = access(path, F_OK) == 0;
    char *all = malloc((size_t)trn_ranks_count(ranks));
    eng_status status = all ? trn_ranks_exchange(ranks, &seen, sizeof seen, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for what ranks see");
    for (int32_t r = 0; status == ENG_OK && r < trn_ranks_count(ranks); r++)
        if (!all[r])
            status = eng_fail(error, ENG_INVALID, "%s: rank %d does not see what rank 0 writes there; ranks share it",
                              eng_path_tail(folder), r);
    free(all);
    return status;
}

eng_status trn_ranks_agree_folder(trn_ranks *ranks, const char *folder, eng_error *error) {
    uint64_t number = 0;
    char name[NAME];
    if (!ranks)
        return ENG_OK;
    if (trn_ranks_own(ranks) == 0 && getrandom(&number, sizeof number, 0) != sizeof number)
        return eng_fail(error, ENG_IO, "no random numbers for a name");
    snprintf(name, sizeof name, ".ranks-step-%016llx.tmp", (unsigned long long)number); // trn_run_clean removes it
    char *path = eng_join_path(folder, name);
    eng_status status = path ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK && trn_ranks_own(ranks) == 0)
        status = eng_write_file_atomic(path, "", 0, error);
    if (status == ENG_OK)
        status = trn_ranks_share(ranks, name, sizeof name, error);
    free(path);
    path = status == ENG_OK ? eng_join_path(folder, name) : NULL;
    if (status == ENG_OK)
        status =
            path ? look_for(ranks, folder, path, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (path && trn_ranks_own(ranks) == 0 && unlink(path) != 0 && status == ENG_OK)
        status = eng_fail(error, ENG_IO, "%s: cannot be removed", eng_path_tail(path));
    free(path);
    return status;
}

eng_status trn_ranks_share_start(trn_ranks *ranks, const char *folder, char **dir, trn_run_state *state,
                                 eng_error *error) {
    struct {
        char name[NAME]; // "": nowhere
        trn_run_state state;
    } start;
    if (!ranks)
        return ENG_OK;
    memset(&start, 0, sizeof start);
    if (*dir) {
        snprintf(start.name, sizeof start.name, "%s", strrchr(*dir, '/') ? strrchr(*dir, '/') + 1 : *dir);
        start.state = *state;
    }
    eng_status status = trn_ranks_share(ranks, &start, sizeof start, error);
    if (status != ENG_OK || trn_ranks_own(ranks) == 0 || !start.name[0])
        return status;
    *state = start.state;
    *dir = eng_join_path(folder, start.name);
    return *dir ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
}
