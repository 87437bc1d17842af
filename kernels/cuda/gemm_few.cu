// SPDX-License-Identifier: Apache-2.0
// Products with a side of at most 16, as those of gates are: in float32, at the speed of the memory that the large
// operand lies in; gemm.cu launches it where a device is `fast`.
//
//     y (m, few) = x w^T        a warp takes some vectors, lanes share k, w lies in shared memory
//     dx (m, n) = dy w          k is few: a thread keeps four columns of w and goes through vectors
//     dw (few, n) += dy^T x     k is long: a thread sums four columns over some vectors; sums.cu adds up blocks of them
// What is short of a vector (dy) is put into shared memory first, padded with zeros.
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/sums.cuh"

enum {
    MOST = 16,
    SHARED_MOST = 64 << 10,
    WARPS = 8,
    VECTORS = 64, // of a block
    LEAST_BLOCKS = 64,
};

struct few_job {
    const float *a, *b;
    int64_t lda, ldb;
    int64_t m;
    int32_t n, k;
    cuda_gemm_output out;
};

// Lane l gets the sum over the lanes of x[l].
static __device__ __forceinline__ float sum_of_lane(float (&x)[CUDA_WARP]) {
    const int lane = threadIdx.x % CUDA_WARP;
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < distance; i++) {
            const bool upper = (lane & distance) != 0;
            const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + distance], distance);
            x[i] = __fadd_rn(upper ? x[i + distance] : x[i], other);
        }
    return x[0];
}

static __device__ __forceinline__ float dot(const float4 &a, const float4 &b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// N outputs, of which out.n exist. Grid: blocks of vectors.
template <int N>
static __global__ void __launch_bounds__(WARPS *CUDA_WARP) outputs_kernel(const __grid_constant__ few_job job) {
    constexpr int SIDE = CUDA_WARP / N; // vectors at once
    extern __shared__ __align__(16) float weights[];
    cuda_begin();
    cuda_await();
    const int lane = threadIdx.x % CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    for (int i = (int)threadIdx.x * 4; i < job.n * job.k; i += WARPS * CUDA_WARP * 4)
        *(float4 *)(weights + i) = *(const float4 *)(job.b + i / job.k * job.ldb + i % job.k);
    __syncthreads();
    const int64_t first = (int64_t)blockIdx.x * VECTORS;
    for (int at = warp * SIDE; at < VECTORS && first + at < job.m; at += WARPS * SIDE) {
        const float *x[SIDE];
#pragma unroll
        for (int v = 0; v < SIDE; v++)
            x[v] = job.a + min(first + at + v, job.m - 1) * job.lda;
        float sum[CUDA_WARP] = {};
#pragma unroll 2
        for (int i = lane * 4; i < job.k; i += CUDA_WARP * 4) {
            float4 input[SIDE];
#pragma unroll
            for (int v = 0; v < SIDE; v++)
                input[v] = *(const float4 *)(x[v] + i);
#pragma unroll
            for (int n = 0; n < N; n++)
                if (n < job.n) {
                    const float4 w = *(const float4 *)(weights + n * job.k + i);
#pragma unroll
                    for (int v = 0; v < SIDE; v++)
                        sum[v * N + n] = dot(input[v], w, sum[v * N + n]);
                }
        }
        const float own = sum_of_lane(sum);
        if (at + lane / N < VECTORS)
            cuda_gemm_write(job.out, (int32_t)(first + at + lane / N), lane % N, own);
    }
}

// The few numbers of vectors [first, first + VECTORS), padded to K.
template <int K>
static __device__ __forceinline__ void stage_vectors(float (&few)[VECTORS][K], const float *from, int64_t ld,
                                                     int64_t first, int64_t vectors, int32_t k) {
    for (int i = (int)threadIdx.x; i < VECTORS * K; i += (int)blockDim.x) {
        const int64_t vector = first + i / K;
        few[i / K][i % K] = vector < vectors && i % K < k ? from[vector * ld + i % K] : 0.0f;
    }
    __syncthreads();
}

// Grid: blocks of vectors, pieces of the columns.
template <int K> static __global__ void __launch_bounds__(256) inputs_kernel(const __grid_constant__ few_job job) {
    __shared__ __align__(16) float few[VECTORS][K];
    cuda_begin();
    cuda_await();
    const int64_t first = (int64_t)blockIdx.x * VECTORS;
    const int32_t column = (int32_t)(blockIdx.y * blockDim.x + threadIdx.x) * 4;
    stage_vectors<K>(few, job.a, job.lda, first, job.m, job.k);
    if (column >= job.n)
        return;
    float4 w[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        w[k] = k < job.k ? *(const float4 *)(job.b + k * job.ldb + column) : make_float4(0, 0, 0, 0);
    const int vectors = (int)(job.m - first < VECTORS ? job.m - first : VECTORS);
#pragma unroll 4
    for (int v = 0; v < vectors; v++) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < K; k++) {
            const float dy = few[v][k];
            sum = make_float4(fmaf(dy, w[k].x, sum.x), fmaf(dy, w[k].y, sum.y), fmaf(dy, w[k].z, sum.z),
                              fmaf(dy, w[k].w, sum.w));
        }
        cuda_gemm_write_quad(job.out, (int32_t)first + v, column, sum);
    }
}

// partial: (blocks, m, n). Grid: blocks of vectors, `each` of them; pieces of the columns.
template <int M>
static __global__ void __launch_bounds__(256)
    weights_kernel(const __grid_constant__ few_job job, int64_t vectors, int32_t each, float *partial) {
    __shared__ __align__(16) float few[VECTORS][M];
    cuda_begin();
    cuda_await();
    const int64_t begin = (int64_t)blockIdx.x * each, end = begin + each < vectors ? begin + each : vectors;
    const int32_t column = (int32_t)(blockIdx.y * blockDim.x + threadIdx.x) * 4;
    float4 sum[M] = {};
    for (int64_t first = begin; first < end; first += VECTORS) {
        stage_vectors<M>(few, job.a, job.lda, first, end, (int32_t)job.m);
        const int count = (int)(end - first < VECTORS ? end - first : VECTORS);
        if (column < job.n)
#pragma unroll 4
            for (int v = 0; v < count; v++) {
                const float4 x = *(const float4 *)(job.b + (first + v) * job.ldb + column);
#pragma unroll
                for (int i = 0; i < M; i++) {
                    const float dy = few[v][i];
                    sum[i] = make_float4(fmaf(dy, x.x, sum[i].x), fmaf(dy, x.y, sum[i].y), fmaf(dy, x.z, sum[i].z),
                                         fmaf(dy, x.w, sum[i].w));
                }
            }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < M; i++)
        if (i < job.m && column < job.n)
            *(float4 *)(partial + ((int64_t)blockIdx.x * job.m + i) * job.n + column) = sum[i];
}

// ---------------------------------------------------------------------------------------------------------- launches

static kern_status run_outputs(const cuda_step *step, const few_job &job) {
    const unsigned blocks = (unsigned)cuda_blocks(job.m, VECTORS);
    const size_t bytes = sizeof(float) * (size_t)job.n * (size_t)job.k;
    auto *kernel = job.n <= MOST / 2 ? outputs_kernel<MOST / 2> : outputs_kernel<MOST>;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status : cuda_start(step, kernel, blocks, WARPS * CUDA_WARP, bytes, job);
}

static unsigned threads_of(int32_t columns) {
    const int32_t quads = (columns / 4 + CUDA_WARP - 1) / CUDA_WARP * CUDA_WARP;
    return quads < 256 ? (unsigned)quads : 256;
}

static kern_status run_inputs(const cuda_step *step, const few_job &job) {
    const unsigned threads = threads_of(job.n);
    const dim3 grid((unsigned)cuda_blocks(job.m, VECTORS), (unsigned)cuda_blocks(job.n / 4, (int)threads));
    return cuda_start(step, job.k <= MOST / 2 ? inputs_kernel<MOST / 2> : inputs_kernel<MOST>, grid, threads, 0, job);
}

static kern_status run_weights(const cuda_step *step, float *partial, const few_job &job, int64_t vectors) {
    const int32_t room = (int32_t)(CUDA_GEMM_PARTIALS / (job.m * job.n)), width = (int32_t)job.m * job.n;
    const cuda_sum_cut cut = cuda_sum_cut_of(vectors, VECTORS, room < CUDA_SUM_BLOCKS / 2 ? room : CUDA_SUM_BLOCKS / 2);
    const unsigned threads = threads_of(job.n);
    const dim3 grid((unsigned)cut.blocks, (unsigned)cuda_blocks(job.n / 4, (int)threads));
    const kern_status status = cuda_start(step, job.m <= MOST / 2 ? weights_kernel<MOST / 2> : weights_kernel<MOST>,
                                          grid, threads, 0, job, vectors, cut.each, partial);
    return status ? status : cuda_add_partials(step, {partial, job.out.c, width, cut.blocks, width, 1, 1});
}

kern_status cuda_gemm_few(const cuda_step *step, char *workspace, const cuda_gemm &g, bool *taken) {
    const bool plain = !g.bias && !g.residual, wide = cuda_operand_is_wide(g.a), b_wide = cuda_operand_is_wide(g.b);
    *taken = false;
    if (g.a.bf16 || g.b.bf16 || g.m < 1 || g.n < 1 || g.k < 1 || g.m > INT32_MAX || g.n > INT32_MAX)
        return KERN_OK;
    const few_job job = {(const float *)g.a.p,
                         (const float *)g.b.p,
                         g.a.ld,
                         g.b.ld,
                         g.m,
                         (int32_t)g.n,
                         (int32_t)(g.k < INT32_MAX ? g.k : 0),
                         cuda_gemm_output_of(g, 0, g.m, 0, g.n, true)};
    if (!g.a.turned && !g.b.turned && g.n <= MOST && wide && b_wide && g.k % 4 == 0 &&
        g.n * g.k * (int64_t)sizeof(float) <= SHARED_MOST) {
        *taken = true;
        return run_outputs(step, job);
    }
    if (!g.a.turned && g.b.turned && g.k <= MOST && b_wide && g.n % 4 == 0 && plain) {
        *taken = true;
        return run_inputs(step, job);
    }
    if (g.a.turned && g.b.turned && g.m <= MOST && b_wide && g.n % 4 == 0 && plain && g.accumulate && g.ldc == g.n &&
        g.m * g.n <= CUDA_GEMM_PARTIALS / LEAST_BLOCKS) {
        *taken = true;
        return run_weights(step, (float *)workspace, job, g.k);
    }
    return KERN_OK;
}
