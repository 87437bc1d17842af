// SPDX-License-Identifier: Apache-2.0
// Parts of blocks of floats between ranks: the ring of connections, and the device's own group; see ranks.h.
//
// Around the ring a sum is made where it travels: part p starts at rank p + 1 and ends, whole, at rank p, so its order
// is that of the ring, and nobody else computes it. A step of the ring sends to the next rank while it receives from
// the one before. The group's calls wait for nothing here; who waits for the device looks after the other ranks.
#include <stdlib.h>
#include <time.h>

#include "engine/forward.h"
#include "trainer/progress.h"
#include "trainer/ranks_internal.h"

enum { ALIGNMENT = 16, EAGER_POLLS = 2000 };

trn_part trn_rank_part(int64_t floats, int32_t rank, int32_t ranks) {
    const int64_t part = floats / ranks / ALIGNMENT * ALIGNMENT;
    return (trn_part){part * rank, rank == ranks - 1 ? floats - part * rank : part};
}

eng_status trn_ranks_use(trn_ranks *ranks, kern_device *device, eng_error *error) {
    unsigned char id[KERN_GROUP_ID] = {0};
    char reason[160] = "";
    if (!ranks || !kern_device_describe(device)->asynchronous)
        return ENG_OK;
    kern_status made = ranks->rank == 0 ? kern_group_name(device, id, reason, sizeof reason) : KERN_OK;
    eng_status status = ENG_OK;
    if (made == KERN_OK) {
        status = trn_ranks_share(ranks, id, sizeof id, error);
        if (status != ENG_OK)
            return status;
        made = kern_group_open(device, id, ranks->rank, ranks->ranks, &ranks->group, reason, sizeof reason);
    }
    if (made == KERN_OK)
        return ENG_OK;
    return eng_fail(error, ENG_DEVICE, "several ranks on %s: %s", kern_device_describe(device)->name,
                    reason[0] ? reason : kern_status_text(made));
}

void trn_ranks_leave(trn_ranks *ranks) {
    if (!ranks)
        return;
    kern_group_close(ranks->group);
    ranks->group = NULL;
}

// ---------------------------------------------------------------------------------------------------------------- ring

typedef struct transfer {
    const void *out;
    void *in;
    size_t out_bytes, in_bytes, sent, received;
} transfer;

// Waits until the ring moves; looks after the connections for control meanwhile, but for those on which the piece of a
// later exchange stands already.
static eng_status wait_for_ring(trn_ranks *ranks, const transfer *t, int *moved, eng_error *error) {
    const int32_t first = ranks->rank == 0, end = ranks->rank == 0 ? ranks->ranks : 1;
    int count = 0;
    ranks->poll[count++] = (struct pollfd){.fd = t->sent < t->out_bytes ? ranks->next : -1, .events = POLLOUT};
    ranks->poll[count++] = (struct pollfd){.fd = t->received < t->in_bytes ? ranks->previous : -1, .events = POLLIN};
    for (int32_t r = first; r < end; r++) {
        bool piece = false;
        eng_status status = trn_ranks_hear(ranks, r, &piece, error);
        if (status != ENG_OK)
            return status;
        ranks->poll[count++] = (struct pollfd){.fd = piece ? -1 : ranks->control[r], .events = POLLIN};
    }
    *moved = poll(ranks->poll, (nfds_t)count, 1000);
    return ENG_OK;
}

static eng_status move(trn_ranks *ranks, transfer *t, eng_error *error) {
    const int32_t next = (ranks->rank + 1) % ranks->ranks, previous = (ranks->rank + ranks->ranks - 1) % ranks->ranks;
    double deadline = trn_seconds() + ranks->wait;
    for (;;) {
        const size_t before = t->sent + t->received;
        if (trn_link_push(ranks->next, t->out, t->out_bytes, &t->sent) != ENG_OK)
            return trn_ranks_lost(ranks, next, false, error);
        if (trn_link_pull(ranks->previous, t->in, t->in_bytes, &t->received) != ENG_OK)
            return trn_ranks_lost(ranks, previous, false, error);
        if (t->sent == t->out_bytes && t->received == t->in_bytes)
            return ENG_OK;
        if (t->sent + t->received > before) {
            deadline = trn_seconds() + ranks->wait;
            continue;
        }
        int moved = 0;
        eng_status status = wait_for_ring(ranks, t, &moved, error);
        if (status != ENG_OK)
            return status;
        if (moved == 0 && trn_seconds() >= deadline)
            return trn_ranks_lost(ranks, t->received < t->in_bytes ? previous : next, true, error);
    }
}

static trn_part part_of(const trn_ranks *ranks, int64_t floats, int32_t distance) {
    int32_t rank = (ranks->rank - distance) % ranks->ranks;
    return trn_rank_part(floats, rank < 0 ? rank + ranks->ranks : rank, ranks->ranks);
}

static eng_status ring_sum(trn_ranks *ranks, float *data, int64_t floats, eng_error *error) {
    for (int32_t step = 1; step < ranks->ranks; step++) {
        const trn_part out = part_of(ranks, floats, step), in = part_of(ranks, floats, step + 1);
        transfer t = {.out = data + out.first,
                      .in = ranks->received,
                      .out_bytes = sizeof(float) * (size_t)out.count,
                      .in_bytes = sizeof(float) * (size_t)in.count};
        eng_status status = move(ranks, &t, error);
        if (status != ENG_OK)
            return status;
        for (int64_t i = 0; i < in.count; i++)
            data[in.first + i] = ranks->received[i] + data[in.first + i];
    }
    return ENG_OK;
}

static eng_status ring_gather(trn_ranks *ranks, float *data, int64_t floats, eng_error *error) {
    for (int32_t step = 1; step < ranks->ranks; step++) {
        const trn_part out = part_of(ranks, floats, step - 1), in = part_of(ranks, floats, step);
        transfer t = {.out = data + out.first,
                      .in = data + in.first,
                      .out_bytes = sizeof(float) * (size_t)out.count,
                      .in_bytes = sizeof(float) * (size_t)in.count};
        eng_status status = move(ranks, &t, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static eng_status make_room(trn_ranks *ranks, int64_t floats, eng_error *error) {
    const int64_t most = trn_rank_part(floats, ranks->ranks - 1, ranks->ranks).count;
    if (most <= ranks->received_floats)
        return ENG_OK;
    float *larger = realloc(ranks->received, sizeof *larger * (size_t)most);
    if (!larger)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a part of the gradient");
    ranks->received = larger;
    ranks->received_floats = most;
    return ENG_OK;
}

// -------------------------------------------------------------------------------------------------------------- either

eng_status trn_ranks_sum(trn_ranks *ranks, kern_stream *stream, float *data, int64_t floats, eng_error *error) {
    if (!ranks)
        return ENG_OK;
    if (ranks->ended)
        return trn_ranks_fail(ranks, error);
    if (ranks->group) {
        const int64_t part = trn_rank_part(floats, 0, ranks->ranks).count;
        return eng_fail_kernel(
            error, kern_group_sum(ranks->group, stream, data, (size_t)part, (size_t)(floats - part * ranks->ranks)),
            "summing gradients");
    }
    eng_status status = make_room(ranks, floats, error);
    return status == ENG_OK ? ring_sum(ranks, data, floats, error) : status;
}

eng_status trn_ranks_gather(trn_ranks *ranks, kern_stream *stream, float *data, int64_t floats, eng_error *error) {
    if (!ranks)
        return ENG_OK;
    if (ranks->ended)
        return trn_ranks_fail(ranks, error);
    if (!ranks->group)
        return ring_gather(ranks, data, floats, error);
    const int64_t part = trn_rank_part(floats, 0, ranks->ranks).count;
    return eng_fail_kernel(
        error, kern_group_gather(ranks->group, stream, data, (size_t)part, (size_t)(floats - part * ranks->ranks)),
        "gathering weights");
}

eng_status trn_ranks_join(trn_ranks *ranks, kern_stream *stream, eng_error *error) {
    if (!ranks || !ranks->group)
        return ENG_OK;
    return eng_fail_kernel(error, kern_group_join(ranks->group, stream), "waiting for other ranks");
}

eng_status trn_ranks_wait(trn_ranks *ranks, kern_stream *stream, eng_error *error) {
    bool done = !ranks || !ranks->group;
    const double deadline = done ? 0 : trn_seconds() + ranks->wait;
    for (int polls = 0; !done; polls++) {
        eng_status status = trn_ranks_check(ranks, error);
        if (status == ENG_OK)
            status = eng_fail_kernel(error, kern_group_poll(ranks->group, stream, &done), "waiting for other ranks");
        if (status != ENG_OK)
            return status;
        if (!done && trn_seconds() >= deadline)
            return eng_fail(error, ENG_IO, "the other ranks have not answered for %g s (--rank-wait)", ranks->wait);
        if (!done && polls > EAGER_POLLS)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    return eng_fail_kernel(error, kern_synchronize(stream), "waiting for the device");
}
