// SPDX-License-Identifier: Apache-2.0
// Convolutions, norms of their heads and gates of generated tokens as one launch (prepare.cuh), or as a phase of a
// chain.
#include "kernels/cuda/prepare.cuh"

#include "kernels/cuda/chain.cuh"

enum { WARPS = 4 };

static __global__ void __launch_bounds__(WARPS *CUDA_WARP)
    prepare_kernel(const cuda_table *table, const __grid_constant__ preparation p) {
    cuda_begin();
    const int32_t t = blockIdx.x;
    const prepare_place at = prepare_find(p, blockIdx.y * WARPS + threadIdx.x / CUDA_WARP);
    const bool convolves = t < table->n_tokens && at.part < p.parts;
    prepare_fetched<PREPARE_QUADS> fetched;
    if (convolves)
        prepare_fetch_weights(p.part[at.part], at.index, fetched);
    cuda_await();
    if (convolves) {
        prepare_fetch_state(table, p.part[at.part], table->row[t].slot, at.index, fetched);
        prepare_convolutions(p.part[at.part], t, at.index, fetched, [](int32_t, const cuda_quad &) {});
    } else if (t < table->n_tokens)
        prepare_gates(p, t, at.index);
}

// ----------------------------------------------------------------------------------------------------------- gathering

static bool conv_fits(const kern_short_conv_args *a) {
    return a->taps == PREPARE_TAPS && a->channels % CUDA_QUAD == 0 && cuda_is_wide(a->x.p) && cuda_is_wide(a->y.p) &&
           cuda_is_wide(a->weight.p) && cuda_is_wide(a->state.p);
}

// The convolution whose heads the norm takes.
static prepare_part *normed_by(preparation *p, const cuda_norm *n) {
    if (!n->wide || n->width > CUDA_NORM_NARROW)
        return NULL;
    for (int32_t i = 0; i < p->parts; i++)
        if (p->part[i].conv.y.f == n->x && !p->part[i].norm.y && p->part[i].conv.channels == n->groups * n->width)
            return &p->part[i];
    return NULL;
}

kern_status cuda_prepare_run(const cuda_step *step, const kern_call *call, int convs, int norms, const kern_call *gates,
                             bool *fits) {
    preparation p = {};
    int32_t pieces = 0;
    *fits = step->generated;
    for (int i = 0; i < convs && *fits; i++) {
        p.part[p.parts].conv = *(const kern_short_conv_args *)call[i].args;
        p.part[p.parts].width = PREPARE_PIECE;
        *fits = conv_fits(&p.part[p.parts++].conv);
    }
    for (int i = 0; i < norms && *fits; i++) {
        const cuda_norm n = cuda_l2norm_of((const kern_l2norm_args *)call[convs + i].args);
        prepare_part *own = normed_by(&p, &n);
        *fits = own != NULL;
        if (own) {
            own->norm = n;
            own->width = n.width;
        }
    }
    if (!*fits)
        return KERN_OK;
    for (int32_t i = 0; i < p.parts; i++)
        pieces += prepare_pieces(p.part[i]);
    if (gates) {
        p.gates = *(const kern_gates_args *)gates->args;
        p.gate_channels = cuda_gate_channels(&p.gates.gates);
        pieces += cuda_blocks(p.gates.gates.heads * p.gate_channels, CUDA_WARP);
    }
    if (cuda_chain_takes(step, 0))
        return cuda_chain_prepare(step, &p, pieces);
    const dim3 grid((unsigned)cuda_blocks(step->tokens, 1), (unsigned)cuda_blocks(pieces, WARPS));
    return cuda_start(step, prepare_kernel, grid, WARPS * CUDA_WARP, 0, step->table, p);
}
