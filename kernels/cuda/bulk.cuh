// SPDX-License-Identifier: Apache-2.0
// Copies of whole runs of memory into shared memory by the copy engine (sm_90), and the barriers in shared memory
// (mbarrier) that count what has come. Nothing here exists for older chips: a kernel that uses it has an empty body
// there and is not started (kern_cuda.overlaps).
//
// A barrier's phase is over when as many threads have arrived as it was made for and all bytes expected have come; what
// they wrote before is then seen by those who waited. Phases are told apart by parity: the first is 0. Waiting for 1 of
// a new barrier returns at once. Addresses and sizes are multiples of 16 bytes.
#ifndef KERNELS_CUDA_BULK_CUH
#define KERNELS_CUDA_BULK_CUH

#include "kernels/cuda/cuda.cuh"

typedef uint64_t cuda_mbarrier;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ __forceinline__ uint32_t cuda_shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// By one thread; the others of the block see it behind a cuda_mbarrier_made by that thread and a barrier of the block.
static __device__ __forceinline__ void cuda_mbarrier_make(cuda_mbarrier *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(cuda_shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
static __device__ __forceinline__ void cuda_mbarrier_made(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same where other blocks of the cluster arrive too; a barrier of the cluster follows.
static __device__ __forceinline__ void cuda_mbarrier_made_for_cluster(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Bytes that belong to the phase that is on; before their copies are asked for.
static __device__ __forceinline__ void cuda_mbarrier_expect(cuda_mbarrier *barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(cuda_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void cuda_mbarrier_arrive(cuda_mbarrier *barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(cuda_shared_address(barrier)) : "memory");
}
// The barrier that a block of the cluster has at this place.
static __device__ __forceinline__ uint32_t cuda_cluster_address(const cuda_mbarrier *barrier, uint32_t block) {
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(cuda_shared_address(barrier)), "r"(block));
    return at;
}
// An arrival there, or at an own barrier; publishes nothing to other blocks, which would wait for all that is under
// way.
static __device__ __forceinline__ void cuda_mbarrier_arrive_in_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// All threads of the cluster have come; what they wrote before is seen behind it.
static __device__ __forceinline__ void cuda_cluster_barrier(void) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same where nothing but what cuda_mbarrier_made_for_cluster publishes is to be seen.
static __device__ __forceinline__ void cuda_cluster_start(void) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// An arrival as soon as all that this thread has asked for with cp.async has come.
static __device__ __forceinline__ void cuda_mbarrier_arrive_after_copies(cuda_mbarrier *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cuda_shared_address(barrier)) : "memory");
}
// Counts in shared memory, in front of a copy that overwrites what was read before: how many have been here. Unlike a
// fence it does not wait for what is on its way to memory.
static __device__ __forceinline__ uint32_t cuda_shared_count(uint32_t *count) {
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(cuda_shared_address(count))
                 : "memory");
    return before;
}
static __device__ __forceinline__ void cuda_mbarrier_wait(cuda_mbarrier *barrier, uint32_t parity) {
    uint32_t over;
    do
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(over)
                     : "r"(cuda_shared_address(barrier)), "r"(parity)
                     : "memory");
    while (!over);
}

static __device__ __forceinline__ void cuda_bulk_load(void *shared, const void *from, uint32_t bytes,
                                                      cuda_mbarrier *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     cuda_shared_address(shared)),
                 "l"(from), "r"(bytes), "r"(cuda_shared_address(barrier))
                 : "memory");
}
// The same of what is read once a step: it leaves the second-level cache before anything else does.
static __device__ __forceinline__ void cuda_bulk_load_once(void *shared, const void *from, uint32_t bytes,
                                                           cuda_mbarrier *barrier) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(cuda_shared_address(shared)),
                 "l"(from), "r"(bytes), "r"(cuda_shared_address(barrier)), "l"(policy)
                 : "memory");
}
// The same for all blocks of the cluster that have a bit in `blocks`, at the same places of their shared memory.
static __device__ __forceinline__ void cuda_bulk_load_for(uint16_t blocks, void *shared, const void *from,
                                                          uint32_t bytes, cuda_mbarrier *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(cuda_shared_address(shared)),
                 "l"(from), "r"(bytes), "r"(cuda_shared_address(barrier)), "h"(blocks)
                 : "memory");
}
// By each thread that has written what a copy is to overwrite or to take, before the barrier that lets the copy begin.
static __device__ __forceinline__ void cuda_bulk_fence(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The other way, by the thread that waits for it; behind a cuda_bulk_fence of those who wrote and a barrier. A kernel
// that has ended has stored it.
static __device__ __forceinline__ void cuda_bulk_store(void *to, const void *shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(cuda_shared_address(shared)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// As cuda_prefetch, of a whole run.
static __device__ __forceinline__ void cuda_bulk_prefetch(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

#endif
#endif
