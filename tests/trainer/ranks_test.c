// SPDX-License-Identifier: Apache-2.0
// Ranks: where they are told to stand, how they meet, sums and exchanges between processes, and that one rank's end is
// named by all others. Then training: one gradient, whatever the number of ranks.
//
// Every rank is a process. All of a case meet at an address of the loopback network that is the case's own, so that no
// two cases ever want the same port.
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "engine/digest.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/progress.h"
#include "trainer/rank_link.h"
#include "trainer/ranks.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { PATIENCE = 300 }; // seconds, for what must happen

// ------------------------------------------------------------------------------------------------------------- places

typedef struct variable {
    const char *name, *value;
} variable;

static const char *const all_variables[] = {"RANK",
                                            "WORLD_SIZE",
                                            "LOCAL_RANK",
                                            "MASTER_ADDR",
                                            "MASTER_PORT",
                                            "OMPI_COMM_WORLD_RANK",
                                            "OMPI_COMM_WORLD_SIZE",
                                            "OMPI_COMM_WORLD_LOCAL_RANK",
                                            "OMPI_COMM_WORLD_LOCAL_SIZE",
                                            "SLURM_PROCID",
                                            "SLURM_NTASKS",
                                            "SLURM_LOCALID",
                                            "SLURM_JOB_NODELIST",
                                            "SLURM_STEP_ID",
                                            "PMI_RANK",
                                            "PMI_SIZE",
                                            "MPI_LOCALRANKID",
                                            "MPI_LOCALNRANKS"};

static eng_status read_place(const variable *given, trn_rank_place *place, eng_error *error) {
    for (size_t i = 0; i < sizeof all_variables / sizeof *all_variables; i++)
        unsetenv(all_variables[i]);
    for (; given->name; given++)
        setenv(given->name, given->value, 1);
    return trn_rank_place_read(place, error);
}

START_TEST(places_are_read_from_launchers) {
    static const struct {
        variable given[8];
        trn_rank_place wanted;
    } cases[] = {
        {{{NULL, NULL}}, {0, 1, 0, "", TRN_RANK_PORT}},
        {{{"RANK", "1"}, {"WORLD_SIZE", "2"}}, {1, 2, 1, "127.0.0.1", TRN_RANK_PORT}},
        {{{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "gpu0"}, {"MASTER_PORT", "4000"}},
         {5, 8, 1, "gpu0", 4000}},
        {{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
         {1, 2, 1, "127.0.0.1", TRN_RANK_PORT}},
        {{{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MASTER_ADDR", "::1"}, {"MPI_LOCALRANKID", "2"}},
         {2, 3, 2, "::1", TRN_RANK_PORT}},
        {{{"SLURM_PROCID", "3"},
          {"SLURM_NTASKS", "4"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_JOB_NODELIST", "node[07-09,11],gpu1"},
          {"SLURM_STEP_ID", "0"}},
         {3, 4, 1, "node07", TRN_RANK_PORT}},
        {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_NODELIST", "n1"}}, // the job's script itself
         {0, 1, 0, "", TRN_RANK_PORT}},
        {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "7"}, {"OMPI_COMM_WORLD_SIZE", "9"}},
         {0, 2, 0, "127.0.0.1", TRN_RANK_PORT}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const trn_rank_place *wanted = &cases[i].wanted;
        trn_rank_place place;
        eng_error error = {0};
        ck_assert_msg(read_place(cases[i].given, &place, &error) == ENG_OK, "%zu: %s", i, error.text);
        ck_assert_msg(place.rank == wanted->rank && place.ranks == wanted->ranks && place.local == wanted->local, "%zu",
                      i);
        ck_assert_str_eq(place.address, wanted->address);
        ck_assert_int_eq(place.port, wanted->port);
    }
}
END_TEST

START_TEST(half_a_place_is_refused) {
    static const struct {
        variable given[6];
        const char *words;
    } cases[] = {
        {{{"RANK", "1"}}, "RANK is set, WORLD_SIZE is not"},
        {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set, RANK is not"},
        {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK: 2 is not in 0..1"},
        {{{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK: -1"},
        {{{"RANK", "0"}, {"WORLD_SIZE", "x"}}, "WORLD_SIZE"},
        {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "65536"}}, "MASTER_PORT"},
        {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
         "2 of 4 ranks are on this host: MASTER_ADDR"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        trn_rank_place place;
        eng_error error = {0};
        ck_assert_int_eq(read_place(cases[i].given, &place, &error), ENG_INVALID);
        ck_assert_msg(strstr(error.text, cases[i].words), "%s", error.text);
        if (strncmp(cases[i].words, "RANK:", 5) == 0)
            ck_assert_int_eq(place.ranks, 1); // it is told as no rank's
    }
}
END_TEST

START_TEST(first_hosts) {
    static const char *const lists[][2] = {{"n1", "n1"},
                                           {"a,b", "a"},
                                           {"node[1-4]", "node1"},
                                           {"node[003,7-9]", "node003"},
                                           {"r[2-3]n[5,6].x,q", "r2n5.x"},
                                           {"n[12]b", "n12b"}};
    char host[TRN_ADDRESS_SIZE];
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        ck_assert_int_eq(trn_rank_first_host(lists[i][0], host, NULL), ENG_OK);
        ck_assert_str_eq(host, lists[i][1]);
    }
    static const char *const bad[] = {"", ",a", "n[", "n[]", "n[1-2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ck_assert_msg(trn_rank_first_host(bad[i], host, NULL) == ENG_INVALID, "%s", bad[i]);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- processes

static trn_rank_place place_of(int32_t rank, int32_t ranks) {
    trn_rank_place place = {.rank = rank, .ranks = ranks, .local = rank, .port = TRN_RANK_PORT};
    const unsigned own = (unsigned)getpgrp(); // the case's: libcheck makes each a group
    snprintf(place.address, sizeof place.address, "127.%u.%u.%u", 64 + (own >> 16) % 128, own >> 8 & 255, own & 255);
    return place;
}

// What a rank does; the status that it leaves with. *ranks is closed by whoever called it.
typedef eng_status rank_work(trn_ranks *ranks, void *shared, eng_error *error);

static void be_rank(int32_t rank, int32_t ranks, rank_work *work, void *shared, char *text) {
    const trn_rank_place place = place_of(rank, ranks);
    trn_ranks *own = NULL;
#ifdef _OPENMP
    omp_set_num_threads(1); // teams of all ranks on the same few cores only wait for each other
#endif
    eng_error error = {0};
    eng_status status = trn_ranks_open(&place, PATIENCE, &own, &error);
    if (status == ENG_OK)
        status = work(own, shared, &error);
    status = trn_ranks_close(own, status, &error);
    snprintf(text, sizeof error.text, "%s", error.text);
    _exit(status == ENG_OK ? 0 : 1);
}

typedef struct rank_end {
    int status; // of wait
    char text[256];
} rank_end;

static void *share_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert(memory != MAP_FAILED);
    return memory;
}

enum { MOST_RANKS = 5 };

// Runs `work` as so many ranks. Their ends are in a memory of their own.
static const rank_end *run_ranks(int32_t ranks, rank_work *work, void *shared) {
    rank_end *end = share_memory(sizeof *end * MOST_RANKS);
    pid_t child[MOST_RANKS];
    for (int32_t r = 0; r < ranks; r++) {
        child[r] = fork();
        ck_assert_int_ge(child[r], 0);
        if (child[r] == 0)
            be_rank(r, ranks, work, shared, end[r].text);
    }
    for (int32_t r = 0; r < ranks; r++)
        ck_assert_int_eq(waitpid(child[r], &end[r].status, 0), child[r]);
    return end;
}

static void all_went_well(const rank_end *end, int32_t ranks) {
    for (int32_t r = 0; r < ranks; r++)
        ck_assert_msg(WIFEXITED(end[r].status) && WEXITSTATUS(end[r].status) == 0, "rank %d: %s", r, end[r].text);
}

// ---------------------------------------------------------------------------------------------------------- transport

static eng_status exchange_numbers(trn_ranks *ranks, void *shared, eng_error *error) {
    const int32_t own = trn_ranks_own(ranks), count = trn_ranks_count(ranks);
    (void)shared;
    for (int64_t round = 0; round < 50; round++) {
        int64_t mine = 1000 * round + own, all[MOST_RANKS] = {0}, told = own == 0 ? round : -1;
        eng_status status = trn_ranks_exchange(ranks, &mine, sizeof mine, all, error);
        if (status == ENG_OK)
            status = trn_ranks_share(ranks, &told, sizeof told, error);
        if (status != ENG_OK)
            return status;
        for (int32_t r = 0; r < count; r++)
            if (all[r] != 1000 * round + r)
                return eng_fail(error, ENG_INTERNAL, "rank %d gave %lld", r, (long long)all[r]);
        if (told != round)
            return eng_fail(error, ENG_INTERNAL, "rank 0 told %lld", (long long)told);
    }
    return trn_ranks_agree(ranks, "mind", "the same", error);
}

START_TEST(what_each_gives_all_get) {
    for (int32_t ranks = 1; ranks <= MOST_RANKS; ranks++)
        all_went_well(run_ranks(ranks, exchange_numbers, NULL), ranks);
}
END_TEST

static float value(int32_t rank, int64_t i) {
    return (float)((rank + 1) * 0.1 + (double)(i % 97) * 1e-3 * (rank % 2 ? 1 : -3));
}

// The order of the ring: part p begins at the rank behind p and ends at p.
static float ring_order(int32_t part, int32_t ranks, int64_t i) {
    float sum = value((part + 1) % ranks, i);
    for (int32_t step = 2; step <= ranks; step++)
        sum += value((part + step) % ranks, i);
    return sum;
}

static const int64_t sizes[] = {1, 15, 16, 80, 81, 1000, 400003}; // the last is more than sockets hold

static eng_status sum_and_gather(trn_ranks *ranks, void *shared, eng_error *error) {
    const int32_t own = trn_ranks_own(ranks), count = trn_ranks_count(ranks);
    (void)shared;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        float *data = malloc(sizeof *data * (size_t)sizes[s]);
        for (int64_t i = 0; i < sizes[s]; i++)
            data[i] = value(own, i);
        eng_status status = trn_ranks_sum(ranks, NULL, data, sizes[s], error);
        if (status == ENG_OK)
            status = trn_ranks_gather(ranks, NULL, data, sizes[s], error);
        for (int32_t r = 0; status == ENG_OK && r < count; r++) {
            const trn_part part = trn_rank_part(sizes[s], r, count);
            for (int64_t i = part.first; status == ENG_OK && i < part.first + part.count; i++)
                if (data[i] != ring_order(r, count, i))
                    status = eng_fail(error, ENG_INTERNAL, "float %lld of %lld is %g, not %g", (long long)i,
                                      (long long)sizes[s], data[i], ring_order(r, count, i));
        }
        free(data);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

START_TEST(parts_are_summed_in_the_ring_s_order) {
    for (int32_t ranks = 2; ranks <= MOST_RANKS; ranks++)
        all_went_well(run_ranks(ranks, sum_and_gather, NULL), ranks);
    for (int32_t ranks = 1; ranks <= MOST_RANKS; ranks++) // parts cover the whole
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            int64_t at = 0;
            for (int32_t r = 0; r < ranks; r++) {
                const trn_part part = trn_rank_part(sizes[s], r, ranks);
                ck_assert_int_eq(part.first, at);
                at += part.count;
            }
            ck_assert_int_eq(at, sizes[s]);
        }
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- ends

static eng_status work_forever(trn_ranks *ranks, eng_error *error) {
    static float data[5000];
    char one = 0, all[MOST_RANKS];
    for (;;) {
        eng_status status = trn_ranks_sum(ranks, NULL, data, 5000, error);
        if (status == ENG_OK)
            status = trn_ranks_exchange(ranks, &one, 1, all, error);
        if (status == ENG_OK)
            status = trn_ranks_gather(ranks, NULL, data, 5000, error);
        if (status != ENG_OK)
            return status;
    }
}

// Rank shared[0] ends in the midst of its work: killed, or with a fault of its own.
static eng_status work_until_killed(trn_ranks *ranks, void *shared, eng_error *error) {
    static float data[5000];
    if (trn_ranks_own(ranks) != *(int32_t *)shared)
        return work_forever(ranks, error);
    for (int i = 0; i < 3; i++)
        if (trn_ranks_sum(ranks, NULL, data, 5000, error) != ENG_OK || i == 2)
            kill(getpid(), SIGKILL);
        else {
            char one = 0, all[MOST_RANKS];
            eng_status status = trn_ranks_exchange(ranks, &one, 1, all, error);
            if (status == ENG_OK)
                status = trn_ranks_gather(ranks, NULL, data, 5000, error);
            if (status != ENG_OK)
                return status;
        }
    return ENG_OK;
}

static eng_status work_until_fault(trn_ranks *ranks, void *shared, eng_error *error) {
    if (trn_ranks_own(ranks) != *(int32_t *)shared)
        return work_forever(ranks, error);
    static float data[5000];
    eng_status status = trn_ranks_sum(ranks, NULL, data, 5000, error);
    return status == ENG_OK ? eng_fail(error, ENG_NUMERIC, "the disk of %s is full", "here") : status;
}

START_TEST(a_rank_that_is_killed_is_named_by_all) {
    int32_t *victim = share_memory(sizeof *victim);
    for (*victim = 0; *victim < 4; ++*victim) {
        char words[32];
        const rank_end *end = run_ranks(4, work_until_killed, victim);
        snprintf(words, sizeof words, "rank %d is gone", *victim);
        for (int32_t r = 0; r < 4; r++)
            if (r == *victim)
                ck_assert(WIFSIGNALED(end[r].status));
            else
                ck_assert_msg(WIFEXITED(end[r].status) && WEXITSTATUS(end[r].status) == 1 && strstr(end[r].text, words),
                              "rank %d, when %d was killed: %s", r, *victim, end[r].text);
    }
}
END_TEST

START_TEST(a_rank_that_fails_tells_all_why) {
    int32_t *victim = share_memory(sizeof *victim);
    for (*victim = 0; *victim < 3; ++*victim) {
        char words[64];
        const rank_end *end = run_ranks(3, work_until_fault, victim);
        snprintf(words, sizeof words, "rank %d: the disk of here is full", *victim);
        for (int32_t r = 0; r < 3; r++)
            ck_assert_msg(WIFEXITED(end[r].status) && WEXITSTATUS(end[r].status) == 1 &&
                              strstr(end[r].text, r == *victim ? "the disk of here is full" : words),
                          "rank %d, when %d failed: %s", r, *victim, end[r].text);
    }
}
END_TEST

// Not before the two others work: whoever is still meeting would tell of another loss.
static void be_killed_at_work(atomic_int *others) {
    while (atomic_load(others) < 2)
        sched_yield();
    kill(getpid(), SIGKILL);
}

// Rank 1 is killed while rank 0 is in the midst of a long step: rank 2 finds it gone and waits for rank 0's word.
static eng_status be_busy_at_a_loss(trn_ranks *ranks, void *shared, eng_error *error) {
    static float data[5000];
    if (trn_ranks_own(ranks) == 1)
        be_killed_at_work(shared);
    atomic_fetch_add((atomic_int *)shared, 1);
    if (trn_ranks_own(ranks) == 0)
        nanosleep(&(struct timespec){.tv_sec = 6}, NULL);
    return trn_ranks_sum(ranks, NULL, data, 5000, error);
}

START_TEST(a_busy_rank_0_is_waited_for) {
    const rank_end *end = run_ranks(3, be_busy_at_a_loss, share_memory(sizeof(atomic_int)));
    for (int32_t r = 0; r < 3; r += 2)
        ck_assert_msg(strstr(end[r].text, "rank 1 is gone"), "rank %d: %s", r, end[r].text);
}
END_TEST

typedef struct loss {
    atomic_int working; // of ranks 0 and 1
    atomic_bool told;
} loss;

// Rank 2 is killed; rank 1 hears of it only when something of its own has failed, as it may when rank 0 cleans up.
static eng_status fail_of_a_loss(trn_ranks *ranks, void *shared, eng_error *error) {
    loss *l = shared;
    char one = 0, all[MOST_RANKS];
    if (trn_ranks_own(ranks) == 2)
        be_killed_at_work(&l->working);
    atomic_fetch_add(&l->working, 1);
    if (trn_ranks_own(ranks) == 0) {
        eng_status status = trn_ranks_exchange(ranks, &one, 1, all, error);
        atomic_store(&l->told, true);
        return status;
    }
    while (!atomic_load(&l->told))
        sched_yield();
    return eng_fail(error, ENG_NOT_FOUND, "the folder has gone");
}

START_TEST(a_loss_is_the_reason_for_what_comes_of_it) {
    const rank_end *end = run_ranks(3, fail_of_a_loss, share_memory(sizeof(loss)));
    for (int32_t r = 0; r < 2; r++)
        ck_assert_msg(strstr(end[r].text, "rank 2 is gone"), "rank %d: %s", r, end[r].text);
}
END_TEST

static eng_status disagree(trn_ranks *ranks, void *shared, eng_error *error) {
    (void)shared;
    return trn_ranks_agree(ranks, "configuration", trn_ranks_own(ranks) == 2 ? "a = 1\nb = 2\n" : "a = 1\nb = 3\n",
                           error);
}

START_TEST(ranks_that_differ_are_told_where) {
    const rank_end *end = run_ranks(3, disagree, NULL);
    for (int32_t r = 0; r < 3; r++)
        ck_assert_str_eq(end[r].text, "rank 2 has another configuration than rank 0: \"b = 2\", not \"b = 3\"");
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- meeting

static eng_status open_alone(const trn_rank_place *place, double wait, eng_error *error) {
    trn_ranks *ranks = NULL;
    eng_status status = trn_ranks_open(place, wait, &ranks, error);
    ck_assert_ptr_null(ranks);
    return status;
}

START_TEST(who_never_comes_is_named) {
    const trn_rank_place first = place_of(0, 3), last = place_of(2, 3);
    eng_error error = {0};
    ck_assert_int_eq(open_alone(&first, 0.2, &error), ENG_IO);
    ck_assert_msg(strstr(error.text, "rank 1 of 3 has not come within 0.2 s"), "%s", error.text);
    eng_error other = {0};
    ck_assert_int_eq(open_alone(&last, 0.2, &other), ENG_IO);
    ck_assert_msg(strstr(other.text, "nobody answers"), "%s", other.text);
}
END_TEST

START_TEST(a_port_that_is_taken_is_told) {
    trn_rank_place place = place_of(0, 2);
    int fd = -1;
    eng_error error = {0};
    ck_assert_int_eq(trn_link_listen(place.address, &place.port, &fd, NULL), ENG_OK);
    ck_assert_int_eq(open_alone(&place, PATIENCE, &error), ENG_IO);
    ck_assert_msg(strstr(error.text, "port 29500: cannot listen") && strstr(error.text, "MASTER_PORT"), "%s",
                  error.text);
    trn_link_close(&fd);
}
END_TEST

typedef struct odd_one {
    const char *bytes; // that a stranger sends first; NULL: none comes
    size_t length;
    int32_t rank, ranks; // what the last process says it is
    int silent;          // strangers more, each of which sends a byte less than the one before, or nothing
} odd_one;

static bool send_stranger(const trn_rank_place *place, const char *bytes, size_t length) {
    int fd = -1;
    return trn_link_connect(place->address, place->port, trn_seconds() + PATIENCE, &fd, NULL) == ENG_OK &&
           trn_link_send(fd, bytes, length, trn_seconds() + PATIENCE) == ENG_OK;
}

// A stranger comes before rank 1 does, and another process says what `odd` says.
static void meet_oddly(const odd_one *odd, rank_end *end) {
    const trn_rank_place first = place_of(0, 2), place = place_of(odd->rank, odd->ranks);
    pid_t child[2];
    for (int i = 0; i < 2; i++) {
        child[i] = fork();
        ck_assert_int_ge(child[i], 0);
        if (child[i] > 0)
            continue;
        if (i == 1 && odd->bytes && !send_stranger(&first, odd->bytes, odd->length))
            _exit(9);
        for (size_t k = 1; i == 1 && k <= (size_t)odd->silent; k++)
            if (!send_stranger(&first, odd->bytes, odd->length > k ? odd->length - k : 0))
                _exit(9);
        trn_ranks *ranks = NULL;
        eng_error error = {0};
        eng_status status = trn_ranks_open(i == 0 ? &first : &place, PATIENCE, &ranks, &error);
        status = trn_ranks_close(ranks, status, &error);
        snprintf(end[i].text, sizeof end[i].text, "%s", error.text);
        _exit(status == ENG_OK ? 0 : 1);
    }
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(waitpid(child[i], &end[i].status, 0), child[i]);
}

START_TEST(strangers_are_sent_away) {
    rank_end *end = share_memory(2 * sizeof *end);
    static const char http[] = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n";
    meet_oddly(&(odd_one){.bytes = http, .length = sizeof http - 1, .rank = 1, .ranks = 2}, end);
    all_went_well(end, 2);
}
END_TEST

// Fifteen that say nothing, or only how a rank begins, and stay: any of them may be a rank that is slow.
START_TEST(silent_strangers_keep_nobody_waiting) {
    rank_end *end = share_memory(2 * sizeof *end);
    meet_oddly(&(odd_one){.bytes = "MESARANK", .length = 7, .rank = 1, .ranks = 2, .silent = 15}, end);
    all_went_well(end, 2);
}
END_TEST

START_TEST(ranks_of_another_run_are_refused) {
    rank_end *end = share_memory(2 * sizeof *end);
    meet_oddly(&(odd_one){.rank = 1, .ranks = 3}, end);
    ck_assert_msg(strstr(end[0].text, "a rank says it is 1 of 3, rank 0 says there are 2"), "%s", end[0].text);
    ck_assert(WEXITSTATUS(end[0].status) == 1 && WEXITSTATUS(end[1].status) == 1);
    ck_assert_msg(strstr(end[1].text, "rank 0: a rank says it is 1 of 3, rank 0 says there are 2"), "%s", end[1].text);
}
END_TEST

// Says that it is rank 1 and listens where nobody does, and is gone once all are welcomed.
static void end_when_welcomed(const trn_rank_place *first) {
    const struct {
        char magic[8];
        uint32_t version;
        int32_t rank, ranks, port;
        uint64_t run;
    } hello = {{'M', 'E', 'S', 'A', 'R', 'A', 'N', 'K'}, 1, 1, 3, 1, 0};
    char welcome;
    int fd = -1;
    if (trn_link_connect(first->address, first->port, trn_seconds() + PATIENCE, &fd, NULL) == ENG_OK &&
        trn_link_send(fd, &hello, sizeof hello, trn_seconds() + PATIENCE) == ENG_OK &&
        trn_link_receive(fd, &welcome, 1, trn_seconds() + PATIENCE) == ENG_OK)
        _exit(0);
    _exit(9);
}

START_TEST(a_rank_that_ends_while_the_ring_is_closed_is_named) {
    rank_end *end = share_memory(3 * sizeof *end);
    pid_t child[3];
    for (int32_t r = 0; r < 3; r++) {
        const trn_rank_place place = place_of(r, 3);
        child[r] = fork();
        ck_assert_int_ge(child[r], 0);
        if (child[r] == 0 && r == 1) {
            const trn_rank_place first = place_of(0, 3);
            end_when_welcomed(&first);
        } else if (child[r] == 0) {
            trn_ranks *ranks = NULL;
            eng_error error = {0};
            eng_status status = trn_ranks_open(&place, 100 * PATIENCE, &ranks, &error);
            snprintf(end[r].text, sizeof end[r].text, "%s", error.text);
            _exit(status == ENG_OK ? 0 : 1);
        }
    }
    for (int32_t r = 0; r < 3; r++)
        ck_assert_int_eq(waitpid(child[r], &end[r].status, 0), child[r]);
    ck_assert_int_eq(WEXITSTATUS(end[1].status), 0);
    for (int32_t r = 0; r < 3; r += 2)
        ck_assert_msg(strstr(end[r].text, "rank 1 is gone"), "rank %d: %s", r, end[r].text);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ training

// Nine rows a step, of unlike lengths and counted targets: no number of ranks divides them evenly.
static void write_unequal(void) {
    const int lengths[] = {31, 3, 64, 17, 1, 31, 90, 8, 2, 40};
    write_documents("d", lengths, 10);
}

static const char nine_rows[] = "[optim]\nlr = 0.01\nwarmup_steps = 0\nclip = 0.5\n"
                                "[train]\nsteps = 9\nbatch_tokens = 288\nmicro_rows = %d\n[solver]\nmode = exact\n";

// Ends with its loop and has a gate, so that a step has figures of exits.
static const char looped[] = "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 2\nnum_heads = 2\n"
                             "head_dim = 16\nintermediate_size = 64\ninitializer_range = 0.1\nnum_loops = 3\n"
                             "exit_gate = true\n";

typedef struct training {
    const char *ini;
    int steps;
    trn_step_report report;
    trn_score score;
    int64_t count;
    double loss, norm, valid;
    int64_t targets;
    float gradients[1 << 16], weights[1 << 16]; // of the last step, after it
} training;

static eng_status gather_gradients(trn_run *run, eng_error *error) {
    eng_status status = ENG_OK;
    for (int32_t b = 0; status == ENG_OK && b < run->optimizer.blocks.count; b++) {
        const trn_block *block = &run->optimizer.blocks.block[b];
        status =
            trn_ranks_gather(run->ranks, run->runner.stream, run->weights->grads + block->first, block->count, error);
    }
    return status;
}

static eng_status same_weights(const trn_run *run, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    char hex[ENG_DIGEST_HEX];
    eng_status status = eng_digest_bytes(run->weights->masters, sizeof(float) * (size_t)run->weights->count, digest);
    eng_digest_hex(digest, hex);
    return status == ENG_OK ? trn_ranks_agree(run->ranks, "model", hex, error) : status;
}

static eng_status train_steps(trn_ranks *ranks, void *shared, eng_error *error) {
    training *t = shared;
    trn_run_config config;
    trn_run run = {0};
    trn_step_report report = {0};
    trn_score score = {0};
    eng_status status = trn_run_config_read(t->ini, NULL, 0, &config, error);
    if (status == ENG_OK)
        status = trn_run_open(&config, ranks, &run, error);
    for (int i = 0; status == ENG_OK && i < t->steps; i++)
        status = trn_run_step(&run, &report, error);
    if (status == ENG_OK)
        status = gather_gradients(&run, error);
    if (status == ENG_OK)
        status = trn_run_validate(&run, &score, error);
    if (status == ENG_OK && trn_ranks_own(ranks) == 0) {
        t->count = run.weights->count;
        t->loss = report.loss;
        t->norm = report.gradient_norm;
        t->valid = score.loss / (double)score.targets;
        t->report = report;
        t->score = score;
        t->targets = report.targets;
        memcpy(t->gradients, run.weights->grads, sizeof(float) * (size_t)t->count);
        memcpy(t->weights, run.weights->masters, sizeof(float) * (size_t)t->count);
    }
    if (status == ENG_OK)
        status = same_weights(&run, error);
    trn_run_close(&run);
    return status;
}

static training *train(int32_t ranks, int micro_rows, int steps, const char *model, const char *section) {
    training *t = share_memory(sizeof *t);
    char more[512];
    int length = snprintf(more, sizeof more, nine_rows, micro_rows);
    snprintf(more + length, sizeof more - (size_t)length, "%s", section);
    t->ini = write_run(model, "d", 32, more);
    t->steps = steps;
    all_went_well(run_ranks(ranks, train_steps, t), ranks);
    return t;
}

static double distance(const float *a, const float *b, int64_t count) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / size);
}

START_TEST(one_gradient_whatever_the_ranks) {
    const char *model = _i == 0 ? mesa_model : hybrid_model;
    write_unequal();
    const training *alone = train(1, 9, 1, model, "");
    const struct {
        int32_t ranks;
        int micro_rows;
    } cuts[] = {{1, 2}, {2, 9}, {2, 2}, {3, 1}};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const training *t = train(cuts[i].ranks, cuts[i].micro_rows, 1, model, "");
        ck_assert_int_eq(t->targets, alone->targets);
        ck_assert_double_eq_tol(t->loss, alone->loss, 1e-6 * alone->loss);
        ck_assert_double_eq_tol(t->norm, alone->norm, 1e-6 * alone->norm);
        double off = distance(t->gradients, alone->gradients, alone->count);
        ck_assert_msg(off < 1e-6, "%d ranks, %d rows at once: gradients differ by %g", cuts[i].ranks,
                      cuts[i].micro_rows, off);
    }
}
END_TEST

START_TEST(a_run_of_ranks_repeats_and_follows_the_curve) {
    write_unequal();
    const training *alone = train(1, 2, 6, mesa_model, "");
    const training *first = train(3, 2, 6, mesa_model, ""), *again = train(3, 2, 6, mesa_model, "");
    ck_assert_mem_eq(first->weights, again->weights, sizeof(float) * (size_t)first->count);
    ck_assert(first->loss == again->loss && first->valid == again->valid);
    double off = distance(first->weights, alone->weights, alone->count);
    ck_assert_msg(off < 1e-4, "weights differ by %g after six steps", off);
    ck_assert_double_eq_tol(first->loss, alone->loss, 1e-4 * alone->loss);
    ck_assert_double_eq_tol(first->valid, alone->valid, 1e-4 * alone->valid);
}
END_TEST

static void same_exits(const trn_exits *a, const trn_exits *b) {
    ck_assert(a->loops == 3 && b->loops == 3 && a->gated && b->gated);
    ck_assert_int_eq(a->targets, b->targets);
    ck_assert_double_eq_tol(a->entropy, b->entropy, 1e-5 * b->entropy);
    for (int r = 0; r < 3; r++) {
        ck_assert_double_eq_tol(a->loss[r], b->loss[r], 1e-5 * b->loss[r]);
        ck_assert_double_eq_tol(a->probability[r], b->probability[r], 1e-5 * b->probability[r]);
        ck_assert_int_eq(a->likeliest[r], b->likeliest[r]);
    }
}

START_TEST(figures_are_of_all_ranks) {
    write_unequal();
    static const char section[] = "[loop]\nloss = expected\n";
    const training *alone = train(1, 9, 1, looped, section), *three = train(3, 2, 1, looped, section);
    const trn_step_report *a = &alone->report, *b = &three->report;
    ck_assert(a->tokens == b->tokens && a->targets == b->targets && a->targets > 0);
    ck_assert(a->solves.solves > 0 && a->solves.solves == b->solves.solves);
    ck_assert_int_eq(a->backward_solves.solves, b->backward_solves.solves);
    ck_assert_int_eq(a->solves.steps_max, b->solves.steps_max);
    same_exits(&b->exits, &a->exits);
    same_exits(&three->score.exits, &alone->score.exits);
    ck_assert_int_eq(three->score.targets, alone->score.targets);
    ck_assert_int_eq(three->score.hits.targets, alone->score.hits.targets);
    ck_assert_int_eq(three->score.hits.rows, alone->score.hits.rows);
}
END_TEST

// A weight in one rank's part alone is not finite; all ranks skip the step and name it.
static eng_status take_bad_step(trn_ranks *ranks, void *shared, eng_error *error) {
    const training *t = shared;
    trn_run_config config;
    trn_run run = {0};
    trn_step_report report = {0};
    eng_status status = trn_run_config_read(t->ini, NULL, 0, &config, error);
    if (status == ENG_OK)
        status = trn_run_open(&config, ranks, &run, error);
    const int32_t tensor = status == ENG_OK ? eng_model_find(run.model, "model.layers.1.mlp.up_proj.weight") : -1;
    if (tensor >= 0)
        run.weights->master[tensor][run.model->tensor[tensor].count - 1] = NAN;
    if (status == ENG_OK)
        status = trn_run_step(&run, &report, error);
    if (status == ENG_OK && (report.outcome != TRN_STEP_NOT_FINITE || run.optimizer.updates != 0 ||
                             strcmp(report.culprit, "weight model.layers.1.mlp.up_proj.weight") != 0))
        status = eng_fail(error, ENG_INTERNAL, "outcome %d, culprit \"%s\"", (int)report.outcome, report.culprit);
    trn_run_close(&run);
    return status;
}

START_TEST(a_bad_step_is_all_ranks_s) {
    training *t = share_memory(sizeof *t);
    char more[512];
    write_unequal();
    snprintf(more, sizeof more, nine_rows, 2);
    t->ini = write_run(mesa_model, "d", 32, more);
    all_went_well(run_ranks(3, take_bad_step, t), 3);
}
END_TEST

static Suite *ranks_suite(void) {
    Suite *suite = suite_create("ranks");
    TCase *cases = tcase_create("ranks");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 2 * PATIENCE);
    tcase_add_test(cases, places_are_read_from_launchers);
    tcase_add_test(cases, half_a_place_is_refused);
    tcase_add_test(cases, first_hosts);
    tcase_add_test(cases, what_each_gives_all_get);
    tcase_add_test(cases, parts_are_summed_in_the_ring_s_order);
    tcase_add_test(cases, a_rank_that_is_killed_is_named_by_all);
    tcase_add_test(cases, a_rank_that_fails_tells_all_why);
    tcase_add_test(cases, a_busy_rank_0_is_waited_for);
    tcase_add_test(cases, a_loss_is_the_reason_for_what_comes_of_it);
    tcase_add_test(cases, ranks_that_differ_are_told_where);
    tcase_add_test(cases, who_never_comes_is_named);
    tcase_add_test(cases, a_port_that_is_taken_is_told);
    tcase_add_test(cases, strangers_are_sent_away);
    tcase_add_test(cases, silent_strangers_keep_nobody_waiting);
    tcase_add_test(cases, ranks_of_another_run_are_refused);
    tcase_add_test(cases, a_rank_that_ends_while_the_ring_is_closed_is_named);
    tcase_add_loop_test(cases, one_gradient_whatever_the_ranks, 0, 2);
    tcase_add_test(cases, a_run_of_ranks_repeats_and_follows_the_curve);
    tcase_add_test(cases, figures_are_of_all_ranks);
    tcase_add_test(cases, a_bad_step_is_all_ranks_s);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(ranks_suite)
