// SPDX-License-Identifier: Apache-2.0
// GET /metrics: the server in Prometheus' text exposition format.
//
// The loop thread counts requests here, or in the slot of their model; everything else is read, when somebody asks,
// from the workers' counters (stats.h), from the HTTP files and from the system. Nothing is gathered for metrics alone.
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "server/limits.h"

enum { SRV_STATUS_SLOTS = 20 };

typedef struct srv_metrics {
    uint64_t requests[SRV_STATUS_SLOTS]; // that ended before a model was known
    uint64_t reloads, failed_reloads;
    int64_t configured; // Unix seconds, since when the present configuration holds
} srv_metrics;

// One request that has ended. status 0: its client left before an answer, told as 499.
void srv_metrics_count(uint64_t requests[SRV_STATUS_SLOTS], int status);

#endif
