// SPDX-License-Identifier: Apache-2.0
// attention of training and evaluation: rows without earlier positions, on tensor cores, tile by tile.
//
// A block owns queries of one head and goes over the tiles of keys that they see, with a running maximum m, sum l and
// output o of each query; o and l are scaled down when m grows. Each is summed by one block in one order.
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/attention_wide.cuh"

struct merged_job {
    const float *q, *k, *v;
    float *o, *lse;
    kern_attention shape;
    bool wide;
};

// Of the two rows that a lane has a part of: lane / 4 of the warp's 16, and 8 further.
struct running {
    float top[2], sum[2];
};

// Scores become probabilities relative to the new maximum; what was gathered before is scaled down.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void normalise(const kern_attention &shape, const int32_t *starts, int32_t query0,
                                                 int32_t key0, running &run, float (&p)[ROWS / 8][4],
                                                 float (&total)[COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + half * 8 + lane / 4;
        const int32_t t = query0 + row, start = starts[row];
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < ROWS / 8 * 2; i++) {
            const int32_t j = key0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
            float &score = p[i / 2][2 * half + i % 2];
            const bool seen = j <= t && j >= start && (shape.window == 0 || t - j < shape.window);
            score = seen ? shape.scale * score : -INFINITY;
            top = cuda_max(score, top);
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(top, run.top[half]);
        const float kept = run.top[half] > -INFINITY ? expf(run.top[half] - top) : 0.0f;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < ROWS / 8 * 2; i++) {
            float &score = p[i / 2][2 * half + i % 2];
            score = score == -INFINITY ? 0.0f : expf(score - top);
            sum += score;
        }
        run.top[half] = top;
        run.sum[half] = fmaf(run.sum[half], kept, sum);
#pragma unroll
        for (int c = 0; c < COLUMNS / 8 * 2; c++)
            total[c / 2][2 * half + c % 2] *= kept;
    }
}

// Grid: tiles of queries, heads, pieces of the columns.
template <int LIMBS, int WIDTH>
static __global__ void __launch_bounds__(cuda_tile<LIMBS, WIDTH>::THREADS)
    merged_kernel(const cuda_table *table, const __grid_constant__ merged_job job) {
    extern __shared__ __align__(16) uint16_t memory[];
    cuda_begin();
    cuda_await();
    typedef cuda_tile<LIMBS, WIDTH> layout;
    constexpr int ROWS = layout::ROWS;
    const kern_attention &s = job.shape;
    uint16_t *q = memory, *k = q + layout::OPERAND, *v = k + layout::OPERAND;
    int32_t *starts = (int32_t *)(v + layout::OPERAND);
    const int32_t tokens = table->n_tokens, query0 = (int32_t)blockIdx.x * ROWS, head = (int32_t)blockIdx.y;
    const int32_t kv_head = head / (s.heads / s.kv_heads), column0 = (int32_t)blockIdx.z * layout::COLUMNS;
    if (query0 >= tokens)
        return;
    cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.q, NULL, s.heads, head, query0, tokens, q, NULL);
    for (int row = threadIdx.x; row < ROWS; row += layout::THREADS)
        starts[row] = query0 + row < tokens ? table->token_start[query0 + row] : INT32_MAX;
    int32_t first = table->token_start[query0];
    if (s.window > 0 && query0 - s.window + 1 > first)
        first = query0 - s.window + 1;
    running run = {{-INFINITY, -INFINITY}, {0, 0}};
    float o[layout::COLUMNS / 8][4] = {};
    for (int32_t key0 = first / ROWS * ROWS; key0 <= query0; key0 += ROWS) {
        __syncthreads();
        cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.k, NULL, s.kv_heads, kv_head, key0, tokens, k, NULL);
        cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.v, NULL, s.kv_heads, kv_head, key0, tokens, v, NULL);
        __syncthreads();
        float p[ROWS / 8][4];
        cuda_score<LIMBS, WIDTH>(q, k, p);
        normalise<ROWS, layout::COLUMNS>(s, starts, query0, key0, run, p, o);
        cuda_gather<LIMBS, WIDTH>(p, v, column0, o);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = run.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float scale = 1.0f / sum;
#pragma unroll
        for (int c = 0; c < layout::COLUMNS / 8 * 2; c++)
            o[c / 2][2 * half + c % 2] *= scale;
        const int32_t t = query0 + warp * 16 + half * 8 + lane / 4;
        if (job.lse && t < tokens && lane % 4 == 0 && blockIdx.z == 0)
            job.lse[(int64_t)t * s.heads + head] = run.top[half] + logf(sum);
    }
    cuda_write_tile<LIMBS, WIDTH>(s.head_width, job.o, s.heads, head, query0, tokens, column0, o);
}

// --------------------------------------------------------------------------------------------------------- launchers

template <int LIMBS, int WIDTH> static kern_status launch(const cuda_step *step, const merged_job &job) {
    typedef cuda_tile<LIMBS, WIDTH> layout;
    const dim3 grid((unsigned)cuda_blocks(step->tokens, layout::ROWS), (unsigned)job.shape.heads,
                    WIDTH / layout::COLUMNS);
    const kern_status status = cuda_allow_shared(merged_kernel<LIMBS, WIDTH>, layout::bytes(3));
    return status ? status
                  : cuda_start(step, merged_kernel<LIMBS, WIDTH>, grid, layout::THREADS, layout::bytes(3), step->table,
                               job);
}

template <int LIMBS> static kern_status launch_width(const cuda_step *step, const merged_job &job) {
    if (job.shape.head_width <= 64)
        return launch<LIMBS, 64>(step, job);
    return job.shape.head_width <= 128 ? launch<LIMBS, 128>(step, job) : launch<LIMBS, 256>(step, job);
}

bool cuda_attention_merges(const cuda_step *step, const kern_attention_args *a) {
    return step->merge && !a->ring.p && !a->pages.p && a->attention.head_width <= 256 &&
           cuda_tile<3, 256>::bytes(3) <= step->cuda->shared_limit;
}

kern_status cuda_attention_merged(const cuda_step *step, const kern_attention_args *a) {
    if (cuda_attention_is_wide(step, &a->attention))
        return cuda_attention_wide(step, a);
    const bool wide =
        a->attention.head_width % 4 == 0 && cuda_is_wide(a->q.p) && cuda_is_wide(a->k.p) && cuda_is_wide(a->v.p);
    const merged_job job = {a->q.f, a->k.f, a->v.f, a->o.f, a->lse.f, a->attention, wide};
    return step->cuda->fast ? launch_width<1>(step, job) : launch_width<3>(step, job);
}
