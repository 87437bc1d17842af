// SPDX-License-Identifier: Apache-2.0
// Counters that one thread writes and another reads, without a lock.
//
// Each counter has one writer, which adds by a relaxed load and store: as cheap as a plain variable. A reader may see
// two counters of different moments, which a scrape every few seconds cannot tell. A histogram's bounds are the
// caller's, its sum is kept in millionths.
#ifndef SERVER_STATS_H
#define SERVER_STATS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef atomic_uint_least64_t srv_counter;

static inline void srv_counter_add(srv_counter *counter, uint64_t value) {
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + value, memory_order_relaxed);
}

static inline void srv_counter_set(srv_counter *counter, uint64_t value) {
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static inline uint64_t srv_counter_read(const srv_counter *counter) {
    return atomic_load_explicit((srv_counter *)counter, memory_order_relaxed);
}

enum { SRV_MAX_BUCKETS = 20 };

typedef struct srv_histogram {
    srv_counter buckets[SRV_MAX_BUCKETS + 1]; // not cumulative; the last is above all bounds
    srv_counter millionths;
} srv_histogram;

typedef struct srv_bucket_bounds {
    size_t count;
    double upper[SRV_MAX_BUCKETS];
} srv_bucket_bounds;

static inline void srv_histogram_add(srv_histogram *histogram, const srv_bucket_bounds *bounds, double value,
                                     uint64_t times) {
    size_t bucket = 0;

    while (bucket < bounds->count && value > bounds->upper[bucket])
        bucket++;
    srv_counter_add(&histogram->buckets[bucket], times);
    srv_counter_add(&histogram->millionths, (uint64_t)(value * 1e6 + 0.5) * times);
}

// What one engine thread tells of itself; only it writes, but for cancelled.
typedef struct srv_stats {
    srv_histogram step_seconds, ttft_seconds, itl_seconds, cg_steps;
    srv_counter prompt_tokens, cached_tokens, completion_tokens;
    srv_counter unconverged, numeric;
    srv_counter cancelled; // loop thread
    // As of the end of the last step.
    srv_counter queued_requests, queued_tokens, running, states_used, states_total, kv_pages_used, kv_pages_total;
    srv_counter device_allocations;
    srv_counter behind, parked, states_stored;
    srv_counter timelines, kept_on_device, kept_on_host, kept_bytes, kept_bytes_total;
    srv_counter prefix_states, prefix_bytes, prefix_bytes_total, prefix_hits, prefix_misses;
    srv_counter prefix_evictions, prefix_audits, prefix_mismatches;
    srv_counter prefix_stored, prefix_fetched, prefix_damaged;
} srv_stats;

extern const srv_bucket_bounds srv_time_bounds, srv_step_bounds; // metrics.c: seconds; solver steps

#endif
