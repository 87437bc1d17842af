// SPDX-License-Identifier: Apache-2.0
// Tokens that wait for a looped model's later loops: into their slots' lists and back, and who goes on to a loop.
//
// The table that is followed lies in device memory with the arrays of its capacities; one block writes it, a thread a
// row. Kernels look at a table before they wait for the launch before (cuda_begin), so whoever reads this one is in
// another graph, which begins when this kernel has ended.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/exit.cuh"

static __device__ __forceinline__ kern_exit_waiting *waiting_of(const cuda_table *table, kern_ptr waiting,
                                                                int32_t slot) {
    return (kern_exit_waiting *)cuda_slot(table, waiting, slot);
}

static __global__ void exit_wait_kernel(const cuda_table *table, kern_exit_wait_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= a.width)
        return;
    const kern_row *row = &table->row[table->token_row[t]];
    float *list = cuda_slot(table, a.list, row->slot), *x = a.x.f + (int64_t)t * a.width + column;
    if (!list)
        return;
    const int32_t before = a.back ? 0 : waiting_of(table, a.waiting, row->slot)->count[a.loop];
    list += (int64_t)(before + t - row->token0) * a.width + column;
    *(a.back ? x : list) = *(a.back ? list : x);
}

kern_status cuda_exit_wait_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_wait_check((const kern_exit_wait_args *)args);
}

kern_status cuda_exit_wait_run(const cuda_step *step, const void *args) {
    const kern_exit_wait_args *a = (const kern_exit_wait_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, exit_wait_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// ------------------------------------------------------------------------------------------------------- who goes on

constexpr int FOLLOW_THREADS = 256, FOLLOW_WARPS = FOLLOW_THREADS / CUDA_WARP;

static __device__ void add_solves(kern_solve_sum &sum, const kern_solve_sum *more, int32_t tokens) {
    for (int32_t t = 0; t < tokens; t++) {
        sum.solves += more[t].solves;
        sum.steps += more[t].steps;
        sum.unconverged += more[t].unconverged;
        sum.steps_max = max(sum.steps_max, more[t].steps_max);
    }
}

// What came through the loop before waits for this one.
static __device__ void arrive(const kern_exit_follow_args &a, const kern_row &row, int32_t r,
                              kern_exit_waiting *waiting) {
    kern_solve_sum *sum = a.sum.p ? (kern_solve_sum *)a.sum.p + r : NULL;
    if (a.loop == 1) {
        waiting->moved = a.begin ? row.length : 0;
        waiting->token0 = row.token0;
    }
    if (sum) {
        kern_solve_sum all = a.loop == 1 ? kern_solve_sum{} : *sum;
        add_solves(all, (const kern_solve_sum *)a.solves.p + waiting->token0, waiting->moved);
        *sum = all;
    }
    if (a.loop < a.loops)
        waiting->count[a.loop] += waiting->moved;
    waiting->moved = 0;
}

// How many of those that wait row r takes along; 0: it does not go on.
static __device__ int32_t going(const cuda_table *table, const kern_exit_follow_args &a, const kern_row &row, int32_t r,
                                kern_exit_waiting *waiting) {
    arrive(a, row, r, waiting);
    const bool on = a.loop < a.loops && (row.through || cuda_exit_loop(cuda_slot(table, a.z, row.slot), a.z_stride,
                                                                       row.exit, a.loops) > a.loop);
    return on ? waiting->count[a.loop] : 0;
}

// A row of all that wait, which end where the row ends.
static __device__ void take_along(const cuda_table *next, int32_t loop, const kern_row &row, int32_t place,
                                  int32_t token0, kern_exit_waiting *waiting) {
    const int32_t count = waiting->count[loop];
    kern_row taken = row;
    taken.token0 = token0;
    taken.length = count;
    taken.position = row.position + row.length - count;
    waiting->count[loop] = 0;
    waiting->moved = count;
    waiting->token0 = token0;
    ((kern_row *)next->row)[place] = taken;
    for (int32_t i = 0; i < count; i++) {
        ((int32_t *)next->token_row)[token0 + i] = place;
        ((int32_t *)next->token_start)[token0 + i] = token0;
        ((int64_t *)next->token_position)[token0 + i] = taken.position + i;
    }
}

// Rows in the high half, tokens in the low one: the sum of those before this thread's in the block, and of all.
static __device__ uint64_t sum_before(uint64_t own, uint64_t *all) {
    __shared__ uint64_t of_warp[FOLLOW_WARPS];
    const int32_t lane = (int32_t)threadIdx.x % CUDA_WARP, warp = (int32_t)threadIdx.x / CUDA_WARP;
    uint64_t before = 0, sum = own;
    for (int32_t step = 1; step < CUDA_WARP; step *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
        sum += lane >= step ? other : 0;
    }
    __syncthreads(); // the turn before has been read
    if (lane == CUDA_WARP - 1)
        of_warp[warp] = sum;
    __syncthreads();
    *all = 0;
    for (int32_t w = 0; w < FOLLOW_WARPS; w++) {
        before += w < warp ? of_warp[w] : 0;
        *all += of_warp[w];
    }
    return before + sum - own;
}

static __global__ void __launch_bounds__(FOLLOW_THREADS)
    exit_follow_kernel(const cuda_table *table, cuda_table *next, kern_exit_follow_args a) {
    cuda_await();
    uint64_t done = 0, all = 0;
    for (int32_t r0 = 0; r0 < table->n_rows; r0 += FOLLOW_THREADS, done += all) {
        const int32_t r = r0 + (int32_t)threadIdx.x;
        const kern_row row = r < table->n_rows ? table->row[r] : kern_row{};
        kern_exit_waiting *waiting = r < table->n_rows ? waiting_of(table, a.waiting, row.slot) : NULL;
        const int32_t count = waiting ? going(table, a, row, r, waiting) : 0;
        const uint64_t place = done + sum_before(count > 0 ? (uint64_t)1 << 32 | (uint64_t)count : 0, &all);
        if (count > 0)
            take_along(next, a.loop, row, (int32_t)(place >> 32), (int32_t)(uint32_t)place, waiting);
    }
    if (threadIdx.x > 0)
        return;
    next->n_rows = (int32_t)(done >> 32);
    next->n_tokens = next->n_generated = (int32_t)(uint32_t)done;
    next->n_logits = next->n_chunks = 0;
    next->slot_stride = table->slot_stride;
    next->page_stride = table->page_stride;
    next->page = table->page; // which stay there as long as this table is run with
}

kern_status cuda_exit_follow_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_follow_check((const kern_exit_follow_args *)args);
}

kern_status cuda_exit_follow_run(const cuda_step *step, const void *args) {
    const kern_exit_follow_args *a = (const kern_exit_follow_args *)args;
    cuda_table *next = (cuda_table *)cuda_mirror_table(kern_rows_owner_of((const kern_rows *)a->next.p)->mirror);
    return cuda_start(step, exit_follow_kernel, 1, FOLLOW_THREADS, 0, step->table, next, *a);
}
