// SPDX-License-Identifier: Apache-2.0
// Ranks: opening, parting, exchanges, and how one rank's end becomes everybody's; see ranks.h.
//
// Rank 0 alone says what the run ends with, so that all name the same rank. A rank that fails sends it the reason; one
// that finds another gone says so and waits for the word. Nobody else closes a connection first, so whose connection
// closes without a word is the one that was lost.
#include "trainer/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/digest.h"
#include "trainer/progress.h"
#include "trainer/ranks_internal.h"

enum { COMPARED = 8192 }; // bytes of a text in which the difference is looked for

static const double word_seconds = 5; // for what a lost rank may have left

int32_t trn_ranks_own(const trn_ranks *ranks) {
    return ranks ? ranks->rank : 0;
}

int32_t trn_ranks_count(const trn_ranks *ranks) {
    return ranks ? ranks->ranks : 1;
}

int32_t trn_ranks_local(const trn_ranks *ranks) {
    return ranks ? ranks->local : 0;
}

// ---------------------------------------------------------------------------------------------------------------- ends

eng_status trn_ranks_fail(const trn_ranks *ranks, eng_error *error) {
    return eng_fail(error, ranks->fault, "%s", ranks->why);
}

static void adopt(trn_ranks *ranks, const trn_frame_fault *fault) {
    ranks->ended = true;
    ranks->fault = fault->code == ENG_OK ? ENG_IO : (eng_status)fault->code;
    snprintf(ranks->why, sizeof ranks->why, "%.*s", (int)sizeof fault->text - 1, fault->text);
}

static void send_fault(int fd, const trn_frame_fault *fault) {
    const trn_frame frame = {TRN_FRAME_FAULT, sizeof *fault};
    const double deadline = trn_seconds() + word_seconds;
    if (fd >= 0 && trn_link_send(fd, &frame, sizeof frame, deadline) == ENG_OK &&
        trn_link_send(fd, fault, sizeof *fault, deadline) != ENG_OK)
        return; // whoever cannot be told finds the connection closed
}

static void announce(trn_ranks *ranks, const trn_frame_fault *fault) {
    for (int32_t r = 1; r < ranks->ranks; r++)
        send_fault(ranks->control[r], fault);
    adopt(ranks, fault);
}

static trn_frame_fault own_fault(const trn_ranks *ranks, eng_status status, const eng_error *error) {
    trn_frame_fault fault = {.rank = ranks->rank, .code = status};
    snprintf(fault.text, sizeof fault.text, "rank %d: %.180s", ranks->rank,
             error->text[0] ? error->text : eng_status_text(status));
    return fault;
}

void trn_ranks_send_own_fault(const trn_ranks *ranks, int fd, eng_status status, const eng_error *error) {
    const trn_frame_fault fault = own_fault(ranks, status, error);
    send_fault(fd, &fault);
}

static void tell_own(trn_ranks *ranks, eng_status status, const eng_error *error) {
    const trn_frame_fault fault = own_fault(ranks, status, error);
    if (ranks->rank == 0)
        announce(ranks, &fault);
    else
        send_fault(ranks->control ? ranks->control[0] : -1, &fault);
}

// The next fault on a connection, whatever stands before it. ENG_IO: it closed; ENG_BUSY: none came in time.
static eng_status read_fault(int fd, double seconds, trn_frame_fault *fault) {
    const double deadline = trn_seconds() + seconds;
    trn_frame frame;
    char skipped[256];
    eng_status status = fd >= 0 ? ENG_OK : ENG_IO;
    while (status == ENG_OK && (status = trn_link_receive(fd, &frame, sizeof frame, deadline)) == ENG_OK) {
        if (frame.kind == TRN_FRAME_FAULT && frame.bytes == sizeof *fault)
            return trn_link_receive(fd, fault, sizeof *fault, deadline);
        for (size_t left = frame.bytes, taken; status == ENG_OK && left > 0; left -= taken) {
            taken = left < sizeof skipped ? left : sizeof skipped;
            status = trn_link_receive(fd, skipped, taken, deadline);
        }
    }
    return status;
}

static trn_frame_fault describe_lost(const trn_ranks *ranks, int32_t rank, bool silent) {
    trn_frame_fault fault = {.rank = rank, .code = ENG_OK};
    if (silent)
        snprintf(fault.text, sizeof fault.text, "rank %d has not answered for %g s (--rank-wait)", rank, ranks->wait);
    else
        snprintf(fault.text, sizeof fault.text, "rank %d is gone without a word: killed?", rank);
    return fault;
}

eng_status trn_ranks_lost(trn_ranks *ranks, int32_t rank, bool silent, eng_error *error) {
    if (ranks->ended)
        return trn_ranks_fail(ranks, error);
    trn_frame_fault fault = describe_lost(ranks, rank, silent), word;
    if (ranks->rank == 0) {
        if (!silent && rank > 0 && read_fault(ranks->control[rank], word_seconds, &word) == ENG_OK)
            fault = word;
        announce(ranks, &fault);
        return trn_ranks_fail(ranks, error);
    }
    if (rank != 0)
        send_fault(ranks->control[0], &fault);
    if (!silent || rank != 0) { // rank 0 may be in the midst of its step
        const eng_status heard = read_fault(ranks->control[0], ranks->wait, &word);
        if (heard == ENG_OK)
            fault = word;
        else if (rank != 0)
            fault = describe_lost(ranks, 0, heard == ENG_BUSY);
    }
    adopt(ranks, &fault);
    return trn_ranks_fail(ranks, error);
}

eng_status trn_ranks_hear(trn_ranks *ranks, int32_t rank, bool *piece, eng_error *error) {
    const int fd = trn_ranks_control(ranks, rank);
    trn_frame frame = {0};
    trn_frame_fault fault;
    *piece = false;
    int there = trn_link_peek(fd, &frame, sizeof frame);
    if (there < 0)
        return trn_ranks_lost(ranks, rank, false, error);
    if (there < (int)sizeof frame)
        return ENG_OK;
    if (frame.kind != TRN_FRAME_FAULT) {
        *piece = true;
        return ENG_OK;
    }
    if (read_fault(fd, word_seconds, &fault) != ENG_OK)
        return trn_ranks_lost(ranks, rank, false, error);
    if (ranks->rank > 0)
        adopt(ranks, &fault);
    else if (fault.code == ENG_OK && fault.rank != rank && fault.rank > 0 && fault.rank < ranks->ranks)
        return trn_ranks_lost(ranks, fault.rank, false, error); // which may have left a word here
    else
        announce(ranks, &fault);
    return trn_ranks_fail(ranks, error);
}

eng_status trn_ranks_check(trn_ranks *ranks, eng_error *error) {
    if (!ranks)
        return ENG_OK;
    if (ranks->ended)
        return trn_ranks_fail(ranks, error);
    const int32_t first = ranks->rank == 0, end = ranks->rank == 0 ? ranks->ranks : 1;
    eng_status status = ENG_OK;
    for (int32_t r = first; status == ENG_OK && r < end; r++) {
        char one;
        bool piece = false;
        if (ranks->control[r] >= 0 && trn_link_peek(ranks->control[r], &one, 1) != 0)
            status = trn_ranks_hear(ranks, r, &piece, error);
    }
    return status;
}

// ----------------------------------------------------------------------------------------------------------- exchanges

static eng_status wait_for_word(trn_ranks *ranks, int count, double deadline) {
    double left = deadline - trn_seconds();
    if (left <= 0)
        return ENG_BUSY;
    poll(ranks->poll, (nfds_t)count, (int)(1000 * (left < 1000 ? left : 1000)) + 1);
    return ENG_OK;
}

// The frame of an exchange that `rank` has begun to send.
static eng_status take_frame(trn_ranks *ranks, int32_t rank, trn_frame_kind kind, size_t bytes, void *data,
                             double deadline, eng_error *error) {
    const int fd = trn_ranks_control(ranks, rank);
    trn_frame frame = {0};
    eng_status status = trn_link_receive(fd, &frame, sizeof frame, deadline);
    if (status == ENG_OK && (frame.kind != (uint32_t)kind || frame.bytes != bytes))
        return eng_fail(error, ENG_INTERNAL, "rank %d is elsewhere in its work than rank %d", rank, ranks->rank);
    if (status == ENG_OK)
        status = trn_link_receive(fd, data, bytes, deadline);
    return status == ENG_OK ? ENG_OK : trn_ranks_lost(ranks, rank, status == ENG_BUSY, error);
}

static eng_status give_frame(trn_ranks *ranks, int32_t rank, trn_frame_kind kind, size_t bytes, const void *data,
                             double deadline, eng_error *error) {
    const int fd = trn_ranks_control(ranks, rank);
    const trn_frame frame = {(uint32_t)kind, (uint32_t)bytes};
    eng_status status = trn_link_send(fd, &frame, sizeof frame, deadline);
    if (status == ENG_OK)
        status = trn_link_send(fd, data, bytes, deadline);
    return status == ENG_OK ? ENG_OK : trn_ranks_lost(ranks, rank, status == ENG_BUSY, error);
}

static eng_status collect(trn_ranks *ranks, size_t bytes, char *all, double deadline, eng_error *error) {
    const int count = ranks->ranks - 1;
    for (int i = 0; i < count; i++)
        ranks->poll[i] = (struct pollfd){.fd = ranks->control[i + 1], .events = POLLIN};
    for (int awaited = count; awaited > 0;) {
        int late = 0;
        while (ranks->poll[late].fd < 0)
            late++;
        if (wait_for_word(ranks, count, deadline) != ENG_OK)
            return trn_ranks_lost(ranks, late + 1, true, error);
        for (int i = 0; i < count; i++) {
            bool piece = false;
            if (ranks->poll[i].fd < 0 || !ranks->poll[i].revents)
                continue;
            eng_status status = trn_ranks_hear(ranks, i + 1, &piece, error);
            if (status == ENG_OK && piece) {
                status =
                    take_frame(ranks, i + 1, TRN_FRAME_PIECE, bytes, all + (size_t)(i + 1) * bytes, deadline, error);
                ranks->poll[i].fd = -1;
                awaited--;
            }
            if (status != ENG_OK)
                return status;
        }
    }
    return ENG_OK;
}

static eng_status await_all(trn_ranks *ranks, size_t bytes, void *all, double deadline, eng_error *error) {
    for (bool piece = false; !piece;) {
        ranks->poll[0] = (struct pollfd){.fd = ranks->control[0], .events = POLLIN};
        if (wait_for_word(ranks, 1, deadline) != ENG_OK)
            return trn_ranks_lost(ranks, 0, true, error);
        eng_status status = ranks->poll[0].revents ? trn_ranks_hear(ranks, 0, &piece, error) : ENG_OK;
        if (status != ENG_OK)
            return status;
    }
    return take_frame(ranks, 0, TRN_FRAME_ALL, bytes, all, deadline, error);
}

eng_status trn_ranks_exchange(trn_ranks *ranks, const void *mine, size_t bytes, void *all, eng_error *error) {
    if (!ranks) {
        memcpy(all, mine, bytes);
        return ENG_OK;
    }
    if (ranks->ended)
        return trn_ranks_fail(ranks, error);
    const double deadline = trn_seconds() + ranks->wait;
    const size_t whole = bytes * (size_t)ranks->ranks;
    if (ranks->rank > 0) {
        eng_status status = give_frame(ranks, 0, TRN_FRAME_PIECE, bytes, mine, deadline, error);
        return status == ENG_OK ? await_all(ranks, whole, all, deadline, error) : status;
    }
    memcpy(all, mine, bytes);
    eng_status status = collect(ranks, bytes, all, deadline, error);
    for (int32_t r = 1; status == ENG_OK && r < ranks->ranks; r++)
        status = give_frame(ranks, r, TRN_FRAME_ALL, whole, all, deadline, error);
    return status;
}

eng_status trn_ranks_share(trn_ranks *ranks, void *data, size_t bytes, eng_error *error) {
    char *all = ranks ? malloc(bytes * (size_t)ranks->ranks) : NULL;
    if (!ranks)
        return ENG_OK;
    eng_status status = all ? trn_ranks_exchange(ranks, data, bytes, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for what ranks share");
    if (status == ENG_OK)
        memcpy(data, all, bytes);
    free(all);
    return status;
}

// ----------------------------------------------------------------------------------------------------------- agreement

// Lines of a and b that differ first, at most 60 bytes of each.
static bool first_difference(const char *a, const char *b, char *left, char *right) {
    while (*a || *b) {
        size_t m = strcspn(a, "\n"), n = strcspn(b, "\n");
        if (m != n || memcmp(a, b, m) != 0) {
            snprintf(left, 64, "%.*s", (int)(m < 60 ? m : 60), a);
            snprintf(right, 64, "%.*s", (int)(n < 60 ? n : 60), b);
            return true;
        }
        a += m + (a[m] == '\n');
        b += n + (b[n] == '\n');
    }
    return false;
}

static eng_status name_difference(trn_ranks *ranks, int32_t other, const char *what, const char *text,
                                  eng_error *error) {
    char own[COMPARED] = "", left[64], right[64];
    char *all = malloc(sizeof own * (size_t)ranks->ranks);
    if (!all)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for what ranks compare");
    snprintf(own, sizeof own, "%s", text);
    eng_status status = trn_ranks_exchange(ranks, own, sizeof own, all, error);
    if (status == ENG_OK) {
        ranks->ended = true; // all ranks see the same and end by themselves
        ranks->fault = ENG_INVALID;
        if (first_difference(all + sizeof own * (size_t)other, all, left, right))
            snprintf(ranks->why, sizeof ranks->why, "rank %d has another %s than rank 0: \"%s\", not \"%s\"", other,
                     what, left, right);
        else
            snprintf(ranks->why, sizeof ranks->why, "rank %d has another %s than rank 0", other, what);
        status = trn_ranks_fail(ranks, error);
    }
    free(all);
    return status;
}

eng_status trn_ranks_agree(trn_ranks *ranks, const char *what, const char *text, eng_error *error) {
    unsigned char own[ENG_DIGEST_BYTES];
    if (!ranks)
        return ENG_OK;
    unsigned char *all = malloc(sizeof own * (size_t)ranks->ranks);
    eng_status status = all ? eng_digest_bytes(text, strlen(text), own) : ENG_NO_MEMORY;
    if (status != ENG_OK)
        eng_fail(error, status, "out of memory for what ranks compare");
    else
        status = trn_ranks_exchange(ranks, own, sizeof own, all, error);
    for (int32_t r = 1; status == ENG_OK && r < ranks->ranks; r++)
        if (memcmp(all + sizeof own * (size_t)r, all, sizeof own) != 0)
            status = name_difference(ranks, r, what, text, error);
    free(all);
    return status;
}

// ---------------------------------------------------------------------------------------------------- opening, parting

static void release(trn_ranks *ranks) {
    for (int32_t r = 0; ranks->control && r < ranks->ranks; r++)
        trn_link_close(&ranks->control[r]);
    trn_link_close(&ranks->next);
    trn_link_close(&ranks->previous);
    free(ranks->control);
    free(ranks->poll);
    free(ranks->received);
    free(ranks);
}

eng_status trn_ranks_open(const trn_rank_place *place, double wait, trn_ranks **out, eng_error *error) {
    *out = NULL;
    if (place->ranks == 1)
        return ENG_OK;
    trn_ranks *ranks = calloc(1, sizeof *ranks);
    if (!ranks)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for %d ranks", place->ranks);
    *ranks = (trn_ranks){.rank = place->rank,
                         .ranks = place->ranks,
                         .local = place->local,
                         .wait = wait,
                         .control = malloc(sizeof(int) * (size_t)place->ranks),
                         .next = -1,
                         .previous = -1,
                         .poll = calloc((size_t)place->ranks + 2, sizeof *ranks->poll)};
    for (int32_t r = 0; ranks->control && r < place->ranks; r++)
        ranks->control[r] = -1;
    eng_error why = {0};
    eng_status status = ranks->control && ranks->poll
                            ? trn_ranks_meet(ranks, place, &why)
                            : eng_fail(&why, ENG_NO_MEMORY, "out of memory for %d ranks", place->ranks);
    if (status == ENG_OK) {
        *out = ranks;
        return ENG_OK;
    }
    status = trn_ranks_close(ranks, status, &why);
    return eng_fail(error, status, "%s", why.text);
}

eng_status trn_ranks_close(trn_ranks *ranks, eng_status status, eng_error *error) {
    char one = 0;
    eng_error other = {0};
    if (!ranks)
        return status;
    char *all = malloc((size_t)ranks->ranks);
    if (status == ENG_OK && all && !ranks->ended)
        (void)!trn_ranks_exchange(ranks, &one, 1, all, NULL); // all is done: whoever is lost now takes nothing along
    if (status != ENG_OK && !ranks->ended && ranks->control && trn_ranks_check(ranks, &other) != ENG_OK) {
        status = other.code;
        *error = other;
    } else if (status != ENG_OK && !ranks->ended) {
        tell_own(ranks, status, error);
    }
    free(all);
    release(ranks);
    return status;
}
