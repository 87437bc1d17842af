// SPDX-License-Identifier: Apache-2.0
// TCP between the ranks of a run: listening, connecting, bytes with a deadline, frames.
//
// Sockets never block; whoever waits says until when. What ends a connection is told by its own status, so that callers
// can name the rank: ENG_IO for one that is gone, ENG_BUSY for one that is silent. Private to ranks*.c.
#ifndef TRAINER_RANK_LINK_H
#define TRAINER_RANK_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

// Listens at port (0: any, which *port then tells): on the loopback alone where address is one by number or
// "localhost", else on all addresses of the host.
ENG_CHECKED eng_status trn_link_listen(const char *address, int32_t *port, int *fd, eng_error *error);
// Tries again until the deadline (trn_seconds) while nobody listens.
ENG_CHECKED eng_status trn_link_connect(const char *address, int32_t port, double deadline, int *fd, eng_error *error);
// A connection that waits at a listener, -1: none.
int trn_link_accept(int listener);
void trn_link_close(int *fd); // -1: nothing

// Moves what goes at once; *at counts. ENG_IO: the other end is gone.
ENG_CHECKED eng_status trn_link_push(int fd, const void *data, size_t bytes, size_t *at);
ENG_CHECKED eng_status trn_link_pull(int fd, void *data, size_t bytes, size_t *at);
// All of it. ENG_BUSY: not before the deadline.
ENG_CHECKED eng_status trn_link_send(int fd, const void *data, size_t bytes, double deadline);
ENG_CHECKED eng_status trn_link_receive(int fd, void *data, size_t bytes, double deadline);
// How many of `bytes` can be read now without taking them; -1: the other end is gone.
int trn_link_peek(int fd, void *data, size_t bytes);

// The number of the address at the other end; false where it is this host's loopback.
bool trn_link_peer(int fd, char *text, size_t size);

#endif
