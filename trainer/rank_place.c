// SPDX-License-Identifier: Apache-2.0
// Reads the environment of a rank; see rank_place.h.
//
// A launcher is a row of variables; the first row whose rank is set decides. A job script of Slurm has the variables of
// its tasks too, though it is none of them: only a step that srun started is.
#include "trainer/rank_place.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/options.h"

typedef struct launcher {
    const char *rank, *ranks, *local;
    const char *here;  // how many of the ranks are on this host; NULL: not told
    const char *hosts; // a list whose first is rank 0's; NULL: not told
    const char *needs; // is set where the row counts; NULL: nothing
} launcher;

static const launcher launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", NULL, NULL, NULL},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL,
     NULL},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL, "SLURM_JOB_NODELIST", "SLURM_STEP_ID"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL, NULL},
};

static const char *value_of(const char *name) {
    const char *value = name ? getenv(name) : NULL;
    return value && value[0] ? value : NULL;
}

static eng_status read_number(const char *name, int64_t least, int64_t most, int32_t *out, eng_error *error) {
    int64_t value = 0;
    eng_status status = trn_parse_integer(name, value_of(name), &value, error);
    if (status != ENG_OK)
        return status;
    if (value < least || value > most)
        return eng_fail(error, ENG_INVALID, "%s: %lld is not in %lld..%lld", name, (long long)value, (long long)least,
                        (long long)most);
    *out = (int32_t)value;
    return ENG_OK;
}

eng_status trn_rank_first_host(const char *list, char *out, eng_error *error) {
    size_t length = 0;
    for (const char *at = list; *at && *at != ',';) {
        bool open = *at == '[';
        size_t taken = open ? strcspn(++at, "-,]") : 1;
        const char *close = open ? strchr(at, ']') : NULL;
        if (length + taken >= TRN_ADDRESS_SIZE || (open && (taken == 0 || !close)))
            return eng_fail(error, ENG_INVALID, "SLURM_JOB_NODELIST: \"%.80s\" has no first host", list);
        memcpy(out + length, at, taken);
        length += taken;
        at = open ? close + 1 : at + 1;
    }
    out[length] = '\0';
    return length > 0 ? ENG_OK : eng_fail(error, ENG_INVALID, "SLURM_JOB_NODELIST: has no first host");
}

static eng_status find_address(const launcher *row, trn_rank_place *place, eng_error *error) {
    const char *given = value_of("MASTER_ADDR"), *hosts = value_of(row->hosts);
    int32_t here = place->ranks;
    if (given) {
        if (strlen(given) >= sizeof place->address)
            return eng_fail(error, ENG_INVALID, "MASTER_ADDR: longer than %zu bytes", sizeof place->address - 1);
        snprintf(place->address, sizeof place->address, "%s", given);
        return ENG_OK;
    }
    if (hosts)
        return trn_rank_first_host(hosts, place->address, error);
    eng_status status = value_of(row->here) ? read_number(row->here, 1, place->ranks, &here, error) : ENG_OK;
    if (status == ENG_OK && here < place->ranks)
        return eng_fail(error, ENG_INVALID, "%d of %d ranks are on this host: MASTER_ADDR must name that of rank 0",
                        here, place->ranks);
    snprintf(place->address, sizeof place->address, "127.0.0.1");
    return status;
}

static eng_status read_place(const launcher *row, trn_rank_place *place, eng_error *error) {
    if (!value_of(row->rank) || !value_of(row->ranks))
        return eng_fail(error, ENG_INVALID, "%s is set, %s is not", value_of(row->rank) ? row->rank : row->ranks,
                        value_of(row->rank) ? row->ranks : row->rank);
    int32_t ranks = 1; // the place's only with its rank: until then a refusal is no rank's
    eng_status status = read_number(row->ranks, 1, TRN_MAX_RANKS, &ranks, error);
    if (status == ENG_OK)
        status = read_number(row->rank, 0, ranks - 1, &place->rank, error);
    if (status == ENG_OK)
        place->ranks = ranks;
    if (status == ENG_OK)
        status = find_address(row, place, error);
    place->local = value_of("MASTER_ADDR") ? 0 : place->rank;
    if (status == ENG_OK && value_of(row->local))
        status = read_number(row->local, 0, TRN_MAX_RANKS - 1, &place->local, error);
    if (status == ENG_OK && value_of("MASTER_PORT"))
        status = read_number("MASTER_PORT", 1, 65535, &place->port, error);
    return status;
}

eng_status trn_rank_place_read(trn_rank_place *out, eng_error *error) {
    *out = (trn_rank_place){.ranks = 1, .port = TRN_RANK_PORT};
    for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
        const launcher *row = &launchers[i];
        if (row->needs && !value_of(row->needs))
            continue;
        if (value_of(row->rank) || (i == 0 && value_of(row->ranks)))
            return read_place(row, out, error);
    }
    return ENG_OK;
}
