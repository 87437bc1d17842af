// SPDX-License-Identifier: Apache-2.0
// A plan's operations as launches: neighbours that do not wait for one another become one launch, and so do a norm
// with the products that read it, a gated product with the two products before it, and convolutions with the norms of
// their heads, the gates and the recurrence.
//
// Nothing changes its place. A launch leaves in memory what its operations would have, bit for bit, also what nobody
// reads again. Whether operations may run together is decided by the ranges of memory that they read and write at this
// step's bounds. All of it is host work of a few comparisons, done when a graph is captured or a prompt runs.
#include "kernels/cuda/gemm_copies.cuh"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/products.cuh"

// ------------------------------------------------------------------------------------------------------------ products

static cuda_range output_of(const cuda_step *step, const cuda_product *p, int i) {
    return cuda_floats_at(step, p->part[i].y, (int64_t)p->groups * p->part[i].rows);
}
static cuda_range residual_of(const cuda_step *step, const cuda_product *p, int i) {
    return cuda_floats_at(step, p->part[i].residual, (int64_t)p->groups * p->part[i].rows);
}

// Whether nothing that the product writes lies in the range.
static bool leaves_alone(const cuda_step *step, const cuda_product *p, cuda_range r) {
    for (int i = 0; i < p->parts; i++)
        if (cuda_overlap(output_of(step, p, i), r))
            return false;
    return !p->gated || !cuda_overlap(cuda_floats_at(step, p->gated, p->part[0].rows), r);
}

// Adds the operation's weight to the product; false: it does not fit beside the others.
static bool join(const cuda_step *step, cuda_product *p, const kern_linear_args *a) {
    cuda_product more;
    if (p->parts == CUDA_PARTS || cuda_product_of(a, &more) != KERN_OK)
        return false;
    if (more.x != p->x || more.cols != p->cols || more.groups != p->groups || more.bf16 != p->bf16)
        return false;
    const cuda_range x = cuda_floats_at(step, p->x, (int64_t)p->groups * p->cols), y = output_of(step, &more, 0);
    if (cuda_overlap(y, x) || !leaves_alone(step, p, x) || !leaves_alone(step, p, y) ||
        !leaves_alone(step, p, residual_of(step, &more, 0)))
        return false;
    for (int i = 0; i < p->parts; i++)
        if (cuda_overlap(y, residual_of(step, p, i)))
            return false;
    p->part[p->parts++] = more.part[0];
    return true;
}

// gated = act(part 0) part 1, elementwise, so it may lie where part 0 does.
static bool join_gated(const cuda_step *step, cuda_product *p, const kern_glu_args *a) {
    const cuda_product_part &gate = p->part[0], &up = p->part[1];
    if (!cuda_product_takes_gated(p) || p->groups != 1 || a->gate.f != gate.y || a->up.f != up.y ||
        a->width != gate.rows || a->width != up.rows)
        return false;
    const cuda_range y = cuda_floats_at(step, a->y.f, a->width);
    if ((a->y.f != gate.y && cuda_overlap(y, output_of(step, p, 0))) || cuda_overlap(y, output_of(step, p, 1)) ||
        cuda_overlap(y, residual_of(step, p, 0)) || cuda_overlap(y, residual_of(step, p, 1)) ||
        cuda_overlap(y, cuda_floats_at(step, p->x, p->cols)))
        return false;
    p->gated = a->y.f;
    p->activation = a->activation;
    return true;
}

// The product that begins with the first call; how many calls it is.
static kern_status gather_product(const cuda_step *step, const kern_call *call, size_t count, cuda_product *p,
                                  size_t *taken) {
    const kern_status status = cuda_product_of((const kern_linear_args *)call->args, p);
    if (status)
        return status;
    size_t n = 1;
    while (n < count && call[n].op == KERN_OP_LINEAR && join(step, p, (const kern_linear_args *)call[n].args))
        n++;
    if (n < count && call[n].op == KERN_OP_GLU && join_gated(step, p, (const kern_glu_args *)call[n].args))
        n++;
    *taken = n;
    return KERN_OK;
}

static kern_status run_products(const cuda_step *step, const kern_call *call, size_t count, size_t *taken) {
    cuda_product product;
    const kern_status status = gather_product(step, call, count, &product, taken);
    return status ? status : cuda_product_launch(step, &product);
}

// Every block reads what is normalised, at its own time: nothing that the launch writes may lie there.
static bool join_norm(const cuda_step *step, cuda_product *p, const kern_rmsnorm_args *a) {
    p->norm = cuda_norm_of(a);
    const int64_t width = (int64_t)a->groups * a->width;
    const cuda_range x = cuda_floats_at(step, a->x.f, width), gate = cuda_floats_at(step, a->gate.f, width);
    const cuda_range y = cuda_floats_at(step, a->y.f, width);
    for (int i = 0; i < p->parts; i++)
        if (cuda_overlap(residual_of(step, p, i), y))
            return false;
    return p->x == a->y.f && p->cols == width && p->groups == 1 && cuda_product_takes_norm(step, p) &&
           !cuda_overlap(x, y) && !cuda_overlap(gate, y) && leaves_alone(step, p, x) && leaves_alone(step, p, gate) &&
           leaves_alone(step, p, y);
}

static kern_status run_norm(const cuda_step *step, const kern_call *call, size_t count, size_t *taken) {
    cuda_product product;
    size_t products = 0;
    if (count > 1 && call[1].op == KERN_OP_HEAD_LOGITS &&
        cuda_head_product_of((const kern_head_logits_args *)call[1].args, &product) == KERN_OK &&
        join_norm(step, &product, (const kern_rmsnorm_args *)call->args)) {
        *taken = 2;
        return cuda_head_launch(step, &product);
    }
    if (count > 1 && call[1].op == KERN_OP_LINEAR &&
        gather_product(step, call + 1, count - 1, &product, &products) == KERN_OK &&
        join_norm(step, &product, (const kern_rmsnorm_args *)call->args)) {
        *taken = 1 + products;
        return cuda_product_launch(step, &product);
    }
    *taken = 1;
    return cuda_rmsnorm_run(step, call->args);
}

// ------------------------------------------------------------------------------------------- neighbours of one kind

// What an operation reads and writes: [0] and [3] are read, [1] and [2] written or both.
struct footprint {
    cuda_range at[4];
};

static bool collide(const footprint &a, const footprint &b) {
    for (int i = 1; i <= 2; i++)
        for (int j = 0; j < 4; j++)
            if (cuda_overlap(a.at[i], b.at[j]) || cuda_overlap(b.at[i], a.at[j]))
                return true;
    return false;
}

// A part of a slot: all slots are alike, so their first ones are compared.
static footprint conv_footprint(const cuda_step *step, const kern_call &call) {
    const kern_short_conv_args *a = (const kern_short_conv_args *)call.args;
    const size_t window = a->state.p ? sizeof(float) * (size_t)(a->taps - 1) * (size_t)a->channels : 0;
    return {{cuda_floats_at(step, a->x.f, a->channels),
             cuda_floats_at(step, a->y.f, a->channels),
             {(const char *)a->state.p, window}}};
}
static bool same_conv(const kern_call &a, const kern_call &b) {
    return ((const kern_short_conv_args *)a.args)->taps == ((const kern_short_conv_args *)b.args)->taps;
}

static footprint l2norm_footprint(const cuda_step *step, const kern_call &call) {
    const kern_l2norm_args *a = (const kern_l2norm_args *)call.args;
    const int64_t width = (int64_t)a->groups * a->width;
    return {{cuda_floats_at(step, a->x.f, width), cuda_floats_at(step, a->y.f, width), {NULL, 0}}};
}
static bool same_l2norm(const kern_call &a, const kern_call &b) {
    return ((const kern_l2norm_args *)a.args)->width == ((const kern_l2norm_args *)b.args)->width;
}

// How many of the calls, from the first on, are of its kind and apart from one another.
template <typename Footprint, typename Same>
static size_t neighbours(const cuda_step *step, const kern_call *call, size_t count, size_t most,
                         const Footprint &footprint_of, const Same &same) {
    size_t n = 1;
    for (; n < count && n < most && call[n].op == call->op && same(call[0], call[n]); n++) {
        const footprint own = footprint_of(step, call[n]);
        for (size_t i = 0; i < n; i++)
            if (collide(footprint_of(step, call[i]), own))
                return n;
    }
    return n;
}

static footprint gates_footprint(const cuda_step *step, const kern_call &call) {
    const kern_gates_args *a = (const kern_gates_args *)call.args;
    const int64_t channels = (int64_t)a->gates.heads * a->gates.channels;
    const cuda_range a_in = cuda_floats_at(step, a->a.f, channels), b_in = cuda_floats_at(step, a->b.f, a->gates.heads);
    return {{a_in, cuda_floats_at(step, a->g.f, channels), cuda_floats_at(step, a->beta.f, a->gates.heads), b_in}};
}

// How many of the norms behind the convolutions, and then the gates, are apart from all that comes before them, but for
// what a norm reads.
struct company {
    size_t norms;
    bool gates;
};
static company company_of(const cuda_step *step, const kern_call *call, size_t convs, size_t count) {
    company all = {};
    size_t n = convs;
    if (n < count && call[n].op == KERN_OP_L2NORM)
        all.norms = neighbours(step, call + n, count - n, convs, l2norm_footprint, same_l2norm);
    for (size_t i = 0; i < all.norms; i++, n++) {
        footprint norm = l2norm_footprint(step, call[n]);
        if (cuda_overlap(norm.at[0], norm.at[1]))
            return {};
        norm.at[0].bytes = 0;
        for (size_t j = 0; j < convs; j++)
            if (collide(norm, conv_footprint(step, call[j])))
                return {};
    }
    if (n < count && call[n].op == KERN_OP_GATES) {
        const footprint gates = gates_footprint(step, call[n]);
        all.gates = true;
        for (size_t i = 0; i < n; i++)
            if (collide(gates, i < convs ? conv_footprint(step, call[i]) : l2norm_footprint(step, call[i])))
                all.gates = false;
    }
    return all;
}

static kern_status run_convs(const cuda_step *step, const kern_call *call, size_t count, size_t *taken) {
    const size_t convs = neighbours(step, call, count, CUDA_CONVS, conv_footprint, same_conv);
    const company more = company_of(step, call, convs, count);
    const size_t before = convs + more.norms + (more.gates ? 1 : 0);
    if (before > convs) {
        const kern_call *core = before < count && call[before].op == KERN_OP_RECURRENCE ? &call[before] : NULL;
        const kern_status status = cuda_prepare_run(step, call, (int)convs, (int)more.norms, more.gates, core, taken);
        if (status || *taken > 0)
            return status;
    }
    *taken = convs;
    return cuda_short_convs_run(step, call, (int)convs);
}

// Products of gemm.cu, which tell what they write.
static bool leaves_copies(const cuda_step *step, kern_op op) {
    return step->merge &&
           (op == KERN_OP_LINEAR || op == KERN_OP_LINEAR_BACKWARD_INPUT || op == KERN_OP_LINEAR_BACKWARD_WEIGHT);
}

// Whether a product that comes before anything else reads p.
static bool is_multiplied(const cuda_step *step, const kern_call *call, size_t count, const void *p) {
    for (size_t i = 0; i < count && leaves_copies(step, call[i].op); i++) {
        const void *args = call[i].args;
        if (call[i].op == KERN_OP_LINEAR && ((const kern_linear_args *)args)->x.p == p)
            return true;
        if (call[i].op == KERN_OP_LINEAR_BACKWARD_INPUT && ((const kern_linear_backward_input_args *)args)->dy.p == p)
            return true;
        if (call[i].op == KERN_OP_LINEAR_BACKWARD_WEIGHT &&
            (((const kern_linear_backward_weight_args *)args)->dy.p == p ||
             ((const kern_linear_backward_weight_args *)args)->x.p == p))
            return true;
    }
    return false;
}

// The outputs of the first call that the products behind it read.
static void expect_products(const cuda_step *step, const kern_call *call, size_t count) {
    const void *out[2] = {};
    if (call->op == KERN_OP_RMSNORM)
        out[0] = ((const kern_rmsnorm_args *)call->args)->y.p;
    if (call->op == KERN_OP_GLU)
        out[0] = ((const kern_glu_args *)call->args)->y.p;
    if (call->op == KERN_OP_RMSNORM_BACKWARD)
        out[0] = ((const kern_rmsnorm_backward_args *)call->args)->dx.p;
    if (call->op == KERN_OP_SHORT_CONV_BACKWARD)
        out[0] = ((const kern_short_conv_backward_args *)call->args)->dx.p;
    if (call->op == KERN_OP_GLU_BACKWARD) {
        out[0] = ((const kern_glu_backward_args *)call->args)->dgate.p;
        out[1] = ((const kern_glu_backward_args *)call->args)->dup.p;
    }
    for (int i = 0; i < 2; i++)
        step->copies->expected[i] = out[i] && is_multiplied(step, call + 1, count - 1, out[i]) ? out[i] : NULL;
}

static kern_status run_some(const cuda_step *step, const kern_call *call, size_t count, size_t behind, size_t *taken) {
    if (!leaves_copies(step, call->op))
        cuda_copies_forget(step);
    if (step->merge && step->copies)
        expect_products(step, call, count + behind);
    switch (call->op) {
    case KERN_OP_LINEAR:
        return run_products(step, call, count, taken);
    case KERN_OP_RMSNORM:
        return run_norm(step, call, count, taken);
    case KERN_OP_SHORT_CONV:
        return run_convs(step, call, count, taken);
    case KERN_OP_L2NORM:
        *taken = neighbours(step, call, count, CUDA_NORMS, l2norm_footprint, same_l2norm);
        return cuda_l2norms_run(step, call, (int)*taken);
    default:
        *taken = 1;
        return cuda_run_of(call->op)(step, call->args);
    }
}

kern_status cuda_run_calls(const cuda_step *step, const kern_call *call, size_t count, size_t behind) {
    for (size_t done = 0, taken = 0; done < count; done += taken) {
        const kern_status status = run_some(step, call + done, count - done, behind, &taken);
        if (status)
            return status;
    }
    return KERN_OK;
}
