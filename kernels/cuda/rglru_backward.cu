// SPDX-License-Identifier: Apache-2.0
// Backward of the RG-LRU, of rows without earlier state. Tokens in reverse, G = dh_t + a_{t+1} G_{t+1}, nothing from a
// later document or a reset; with r, i, L and mult as in rglru.cu:
//     d(i x) = G mult                dL = a h_{t-1} G - (i x) G 2 a^2 / sqrt(max(4 (1 - a^2), 1e-6))
//     dr = -8 softplus(p) dL r (1 - r)        dp += -8 s(p) sum_t r dL;  a reset gives dL = 0 and mult = 1
//
// A block owns 32 channels of some rows and goes over a row's tokens 16 at a time: its 16 warps make the decay of a
// token each, the first warp goes through them to the G of each, then each warp writes its token's gradients. A warp's
// sum over its tokens is added to the others' in their order, rows in theirs.
#include "kernels/cuda/sums.cuh"

enum { TILE = 16, LEAST_ROWS = 1 };

static __device__ __forceinline__ void write_gradients(const kern_rglru_backward_args &a, int64_t at, float softplus,
                                                       bool first, bool reset, float decay, float G, float *sum) {
    const float x = a.x.f[at], gate = a.input_gate.f[at], input = cuda_sigmoid(gate);
    const float r = cuda_sigmoid(a.recurrence_gate.f[at]);
    float d_in = G, dL = 0;
    if (!reset) {
        const float rest = -expm1f(-16.0f * r * softplus), before = first ? 0.0f : a.h.f[at - a.width];
        const float slope = 2.0f * decay * decay / sqrtf(fmaxf(1e-6f, 4.0f * rest));
        d_in = G * sqrtf(rest);
        dL = decay * G * before - input * x * G * slope;
    }
    *sum = fmaf(r, dL, *sum);
    a.dx.f[at] = d_in * input;
    a.dinput_gate.f[at] = d_in * x * (input * cuda_sigmoid(-gate));
    a.drecurrence_gate.f[at] = -8.0f * softplus * dL * (r * (1.0f - r));
}

// partial: (blocks of rows, width).
static __global__ void __launch_bounds__(TILE *CUDA_WARP)
    rglru_backward_kernel(const cuda_table *table, const kern_rglru_backward_args a, int32_t each, float *partial) {
    __shared__ float decays[TILE][CUDA_WARP], gradients[TILE][CUDA_WARP];
    cuda_begin();
    cuda_await();
    const int32_t lane = threadIdx.x, warp = threadIdx.y, c = (int32_t)blockIdx.y * CUDA_WARP + lane;
    const int32_t row0 = (int32_t)blockIdx.x * each;
    const int32_t row1 = row0 + each < table->n_rows ? row0 + each : table->n_rows;
    const bool there = c < a.width;
    const float p = there ? a.recurrent_param.f[c] : 0.0f, softplus = cuda_softplus(p);
    float sum = 0;
    for (int32_t index = row0; index < row1; index++) {
        const int32_t token0 = table->row[index].token0, tokens = table->row[index].length;
        float carried = 0; // a_{t+1} G_{t+1}
        for (int32_t first = (tokens - 1) / TILE * TILE; first >= 0; first -= TILE) {
            const int32_t count = tokens - first < TILE ? tokens - first : TILE, t = token0 + first + warp;
            const int64_t at = (int64_t)t * a.width + c;
            const bool own = there && warp < count, reset = own && table->token_position[t] == 0;
            const bool begins = own && table->token_start[t] == t;
            float decay = 0;
            if (own) {
                decay =
                    reset ? 0.0f : expf(__fmul_rn(__fmul_rn(-8.0f, cuda_sigmoid(a.recurrence_gate.f[at])), softplus));
                decays[warp][lane] = begins ? 0.0f : decay; // what goes to the token before
                gradients[warp][lane] = a.dh.f[at];
            }
            __syncthreads();
            if (warp == 0 && there)
                for (int32_t i = count - 1; i >= 0; i--) {
                    const float G = gradients[i][lane] + carried;
                    gradients[i][lane] = G;
                    carried = decays[i][lane] * G;
                }
            __syncthreads();
            if (own)
                write_gradients(a, at, softplus, begins, reset, decay, gradients[warp][lane], &sum);
            __syncthreads();
        }
    }
    gradients[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || !there)
        return;
    for (int i = 1; i < TILE; i++)
        sum = __fadd_rn(sum, gradients[i][lane]);
    partial[(int64_t)blockIdx.x * a.width + c] = -8.0f * cuda_sigmoid(p) * sum;
}

kern_status cuda_rglru_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_rglru_backward_args *a = (const kern_rglru_backward_args *)args;
    const bool complete = a->x.ref && a->input_gate.ref && a->recurrence_gate.ref && a->recurrent_param.ref &&
                          a->h.ref && a->dh.ref && a->dx.ref && a->dinput_gate.ref && a->drecurrence_gate.ref &&
                          a->grad_recurrent_param.ref;
    *workspace_bytes = cuda_sum_bytes(a->width, CUDA_SUM_FEW_BLOCKS);
    return complete && a->width >= 1 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_rglru_backward_run(const cuda_step *step, const void *args) {
    const kern_rglru_backward_args *a = (const kern_rglru_backward_args *)args;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->rows, LEAST_ROWS, CUDA_SUM_FEW_BLOCKS);
    const dim3 grid((unsigned)cut.blocks, (unsigned)cuda_blocks(a->width, CUDA_WARP));
    float *partial = (float *)step->cuda->workspace;
    const kern_status status =
        cuda_start(step, rglru_backward_kernel, grid, dim3(CUDA_WARP, TILE), 0, step->table, *a, cut.each, partial);
    return status ? status
                  : cuda_add_partials(step, {partial, a->grad_recurrent_param.f, a->width, cut.blocks, a->width, 1, 1});
}
