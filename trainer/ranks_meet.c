// SPDX-License-Identifier: Apache-2.0
// How the ranks of a run meet; see ranks_internal.h.
//
// Rank 0 listens where the place says until all others have come. Each of them listens too, for the one before it in
// the ring, and says where. When all are there rank 0 tells everybody the run's number and who listens where. Whoever
// connects and is no rank of this run (a port scanner, another program) is sent away without being believed anything;
// one that stays silent keeps nobody waiting, for it may be a rank of a busy host.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "trainer/progress.h"
#include "trainer/ranks_internal.h"

enum { VERSION = 1, STRANGERS = 16 };

static const double look_seconds = 3; // after which who tries to connect looks whether the run is over

static const char magic[8] = "MESARANK";

typedef struct hello { // of a rank to rank 0, and of a rank to the next of its ring
    char magic[8];
    uint32_t version;
    int32_t rank, ranks, port;
    uint64_t run; // 0: to rank 0
} hello;

typedef struct welcome {
    char magic[8];
    uint64_t run;
} welcome;

typedef struct seat { // where a rank listens for the ring
    char address[64]; // "": on rank 0's host
    int32_t port;
    int32_t unused;
} seat;

typedef struct guest { // who has come, and not said all of who it is
    int fd;
    size_t there;
    hello said;
} guest;

typedef struct door {
    int listener;
    int32_t count, room;
    guest *guest;        // (room) in the order of their coming
    struct pollfd *poll; // (room + 2)
} door;

static hello greet(const trn_ranks *ranks, int32_t port, uint64_t run) {
    hello own = {.version = VERSION, .rank = ranks->rank, .ranks = ranks->ranks, .port = port, .run = run};
    memcpy(own.magic, magic, sizeof magic);
    return own;
}

// --------------------------------------------------------------------------------------------------------------- door

static void close_door(door *d) {
    for (int32_t i = 0; i < d->count; i++)
        trn_link_close(&d->guest[i].fd);
    trn_link_close(&d->listener);
    free(d->guest);
    free(d->poll);
}

static eng_status open_door(door *d, const trn_rank_place *place, int32_t *port, eng_error *error) {
    *d = (door){.listener = -1, .room = place->ranks + STRANGERS};
    d->guest = calloc((size_t)d->room, sizeof *d->guest);
    d->poll = calloc((size_t)d->room + 2, sizeof *d->poll);
    if (!d->guest || !d->poll)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for %d ranks", place->ranks);
    return trn_link_listen(place->address, port, &d->listener, error);
}

static int forget_guest(door *d, int32_t i) {
    const int fd = d->guest[i].fd;
    memmove(d->guest + i, d->guest + i + 1, sizeof *d->guest * (size_t)(--d->count - i));
    return fd;
}

static void send_away(door *d, int32_t i) {
    int fd = forget_guest(d, i);
    trn_link_close(&fd);
}

static void let_in(door *d) {
    for (int fd; (fd = trn_link_accept(d->listener)) >= 0;) {
        if (d->count == d->room)
            send_away(d, 0);
        d->guest[d->count++] = (guest){.fd = fd};
    }
}

// The connection of one that has said who it is; -1: nobody.
static int take_guest(door *d, hello *h) {
    let_in(d);
    for (int32_t i = 0; i < d->count;) {
        guest *g = &d->guest[i];
        eng_status status = trn_link_pull(g->fd, &g->said, sizeof g->said, &g->there);
        if (status != ENG_OK || memcmp(g->said.magic, magic, g->there < sizeof magic ? g->there : sizeof magic) != 0) {
            send_away(d, i);
        } else if (g->there == sizeof g->said) {
            *h = g->said;
            return forget_guest(d, i);
        } else {
            i++;
        }
    }
    return -1;
}

// Waits a second at most for somebody to come or to speak, and notices who goes.
static eng_status wait_at_door(trn_ranks *ranks, door *d, double deadline, eng_error *error) {
    nfds_t count = 0;
    d->poll[count++] = (struct pollfd){.fd = d->listener, .events = POLLIN};
    d->poll[count++] = (struct pollfd){.fd = ranks->rank > 0 ? ranks->control[0] : -1, .events = POLLIN};
    for (int32_t i = 0; i < d->count; i++)
        d->poll[count++] = (struct pollfd){.fd = d->guest[i].fd, .events = POLLIN};
    double left = deadline - trn_seconds();
    poll(d->poll, count, left > 0 ? (int)(1000 * (left < 1 ? left : 1)) + 1 : 0);
    return trn_ranks_check(ranks, error);
}

// ------------------------------------------------------------------------------------------------------------- rank 0

static int32_t missing(const trn_ranks *ranks) {
    for (int32_t r = 1; r < ranks->ranks; r++)
        if (ranks->control[r] < 0)
            return r;
    return 0;
}

static eng_status check_hello(const trn_ranks *ranks, const hello *h, eng_error *error) {
    if (h->version != VERSION)
        return eng_fail(error, ENG_INVALID, "rank %d is of another version", h->rank);
    if (h->ranks != ranks->ranks || h->rank < 1 || h->rank >= ranks->ranks)
        return eng_fail(error, ENG_INVALID, "a rank says it is %d of %d, rank 0 says there are %d", h->rank, h->ranks,
                        ranks->ranks);
    if (ranks->control[h->rank] >= 0)
        return eng_fail(error, ENG_INVALID, "two processes say that they are rank %d", h->rank);
    return ENG_OK;
}

static eng_status admit(trn_ranks *ranks, int fd, const hello *h, seat *seats, eng_error *error) {
    eng_status status = check_hello(ranks, h, error);
    if (status != ENG_OK) { // it has no place among those who are told
        trn_ranks_send_own_fault(ranks, fd, status, error);
        trn_link_close(&fd);
        return status;
    }
    ranks->control[h->rank] = fd;
    trn_link_peer(fd, seats[h->rank].address, sizeof seats[h->rank].address);
    seats[h->rank].port = h->port;
    return ENG_OK;
}

static eng_status gather_ranks(trn_ranks *ranks, door *d, seat *seats, double deadline, eng_error *error) {
    for (int32_t gone; (gone = missing(ranks)) > 0;) {
        hello h;
        eng_status status = wait_at_door(ranks, d, deadline, error);
        for (int fd; status == ENG_OK && (fd = take_guest(d, &h)) >= 0;)
            status = admit(ranks, fd, &h, seats, error);
        if (status != ENG_OK)
            return status;
        if (trn_seconds() >= deadline && (gone = missing(ranks)) > 0)
            return eng_fail(error, ENG_IO, "rank %d of %d has not come within %g s (--rank-wait)", gone, ranks->ranks,
                            ranks->wait);
    }
    return ENG_OK;
}

static eng_status welcome_all(trn_ranks *ranks, const welcome *w, const seat *seats, double deadline,
                              eng_error *error) {
    for (int32_t r = 1; r < ranks->ranks; r++) {
        eng_status status = trn_link_send(ranks->control[r], w, sizeof *w, deadline);
        if (status == ENG_OK)
            status = trn_link_send(ranks->control[r], seats, sizeof *seats * (size_t)ranks->ranks, deadline);
        if (status != ENG_OK)
            return trn_ranks_lost(ranks, r, status == ENG_BUSY, error);
    }
    return ENG_OK;
}

static eng_status receive_ranks(trn_ranks *ranks, const trn_rank_place *place, welcome *w, seat *seats, double deadline,
                                eng_error *error) {
    int32_t port = place->port;
    door d;
    eng_status status = open_door(&d, place, &port, error);
    if (status == ENG_OK)
        status = gather_ranks(ranks, &d, seats, deadline, error);
    close_door(&d);
    if (status != ENG_OK)
        return status;
    memcpy(w->magic, magic, sizeof magic);
    if (getrandom(&w->run, sizeof w->run, 0) != sizeof w->run)
        return eng_fail(error, ENG_IO, "no random numbers for the run");
    return welcome_all(ranks, w, seats, deadline, error);
}

// ------------------------------------------------------------------------------------------------------------- others

// A fault of rank 0 may come in a welcome's place.
static eng_status read_welcome(trn_ranks *ranks, welcome *w, seat *seats, double deadline, eng_error *error) {
    char head[sizeof(trn_frame)] = "";
    eng_status status = ENG_OK;
    for (int there = 0; status == ENG_OK && there < (int)sizeof head;) {
        struct pollfd one = {.fd = ranks->control[0], .events = POLLIN};
        double left = deadline - trn_seconds();
        there = left > 0 && poll(&one, 1, (int)(1000 * (left < 1 ? left : 1)) + 1) > 0
                    ? trn_link_peek(ranks->control[0], head, sizeof head)
                    : 0;
        status = there < 0 ? ENG_IO : left <= 0 ? ENG_BUSY : ENG_OK;
    }
    trn_frame frame;
    memcpy(&frame, head, sizeof frame);
    bool piece = false;
    if (status == ENG_OK && frame.kind == TRN_FRAME_FAULT && frame.bytes == sizeof(trn_frame_fault))
        return trn_ranks_hear(ranks, 0, &piece, error);
    if (status == ENG_OK)
        status = trn_link_receive(ranks->control[0], w, sizeof *w, deadline);
    if (status == ENG_OK && memcmp(w->magic, magic, sizeof magic) != 0)
        return eng_fail(error, ENG_INVALID, "who listens where rank 0 should is no rank (MASTER_ADDR, MASTER_PORT)");
    if (status == ENG_OK)
        status = trn_link_receive(ranks->control[0], seats, sizeof *seats * (size_t)ranks->ranks, deadline);
    return status == ENG_OK ? ENG_OK : trn_ranks_lost(ranks, 0, status == ENG_BUSY, error);
}

static eng_status go_to_rank_0(trn_ranks *ranks, const trn_rank_place *place, int32_t port, welcome *w, seat *seats,
                               double deadline, eng_error *error) {
    eng_status status = trn_link_connect(place->address, place->port, deadline, &ranks->control[0], error);
    if (status != ENG_OK)
        return status;
    const hello own = greet(ranks, port, 0);
    status = trn_link_send(ranks->control[0], &own, sizeof own, deadline);
    if (status != ENG_OK)
        return trn_ranks_lost(ranks, 0, status == ENG_BUSY, error);
    return read_welcome(ranks, w, seats, deadline, error);
}

// --------------------------------------------------------------------------------------------------------------- ring

static eng_status await_previous(trn_ranks *ranks, door *d, uint64_t run, double deadline, eng_error *error) {
    const int32_t wanted = (ranks->rank + ranks->ranks - 1) % ranks->ranks;
    while (ranks->previous < 0) {
        hello h;
        eng_status status = wait_at_door(ranks, d, deadline, error);
        if (status != ENG_OK)
            return status;
        for (int fd; ranks->previous < 0 && (fd = take_guest(d, &h)) >= 0;)
            if (h.run == run && h.rank == wanted)
                ranks->previous = fd;
            else
                trn_link_close(&fd);
        if (ranks->previous < 0 && trn_seconds() >= deadline)
            return trn_ranks_lost(ranks, wanted, true, error);
    }
    return ENG_OK;
}

// A rank that ends now leaves nobody there: its end is heard from rank 0, or by it.
static eng_status go_to_next(trn_ranks *ranks, const char *address, int32_t port, double deadline, eng_error *error) {
    const int32_t next = (ranks->rank + 1) % ranks->ranks;
    for (;;) {
        const double look = trn_seconds() + look_seconds;
        if (trn_link_connect(address, port, look < deadline ? look : deadline, &ranks->next, NULL) == ENG_OK)
            return ENG_OK;
        eng_status status = trn_ranks_check(ranks, error);
        if (status != ENG_OK)
            return status;
        if (trn_seconds() >= deadline)
            return trn_ranks_lost(ranks, next, false, error);
    }
}

static eng_status close_ring(trn_ranks *ranks, const trn_rank_place *place, door *d, uint64_t run, const seat *seats,
                             double deadline, eng_error *error) {
    const int32_t next = (ranks->rank + 1) % ranks->ranks;
    const seat *there = &seats[next];
    // What rank 0 sees as its own host is, from elsewhere, where rank 0 was found.
    const char *address = there->address[0] ? there->address : place->address;
    const hello own = greet(ranks, 0, run);
    eng_status status = go_to_next(ranks, address, there->port, deadline, error);
    if (status != ENG_OK)
        return status;
    status = trn_link_send(ranks->next, &own, sizeof own, deadline);
    if (status != ENG_OK)
        return trn_ranks_lost(ranks, next, status == ENG_BUSY, error);
    return await_previous(ranks, d, run, deadline, error);
}

eng_status trn_ranks_meet(trn_ranks *ranks, const trn_rank_place *place, eng_error *error) {
    const double deadline = trn_seconds() + ranks->wait;
    int32_t port = 0;
    door d = {.listener = -1}; // of the ring
    welcome w = {0};
    seat *seats = calloc((size_t)ranks->ranks, sizeof *seats);
    eng_status status = seats ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for %d ranks", ranks->ranks);
    if (status == ENG_OK)
        status = open_door(&d, place, &port, error);
    if (status == ENG_OK && ranks->rank == 0) {
        seats[0].port = port;
        status = receive_ranks(ranks, place, &w, seats, deadline, error);
    } else if (status == ENG_OK) {
        status = go_to_rank_0(ranks, place, port, &w, seats, deadline, error);
        seats[0].address[0] = '\0';
    }
    for (int32_t r = 0; status == ENG_OK && r < ranks->ranks; r++)
        seats[r].address[sizeof seats[r].address - 1] = '\0';
    if (status == ENG_OK)
        status = close_ring(ranks, place, &d, w.run, seats, deadline, error);
    close_door(&d);
    free(seats);
    return status;
}
