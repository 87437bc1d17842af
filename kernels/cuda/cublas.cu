// SPDX-License-Identifier: Apache-2.0
// cuBLASLt: its library, the algorithm of a shape, products in slices; cublas.cuh.
//
// A matrix in rows is its own transpose in columns, which is how the library has matrices: c^T = b a^T, so its first
// operand is our b. An operand whose vectors lie in rows is one that it transposes on the way (b) or has as it wants it
// (a), a turned one the other way round. Operands are copies (gemm_copies.cuh), each slice of them at most
// CUDA_COPY_MOST bytes; what is added to c stands as the library's C, c itself or the residual.
//
// Algorithms are kept in a table that is searched from where the last search ended, since steps repeat. A shape that
// comes when it is full takes the place of the oldest, which will be chosen as before if it comes again.
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm_copies.cuh"
#include "kernels/cuda/gemm_tile.cuh"

enum {
    SHAPES = 256,
    BIAS_FLOATS = 1 << 18, // of one that is copied because it is not aligned
    ALIGNED = 16,
};
static const size_t workspace_bytes = sizeof(float) * CUDA_GEMM_PARTIALS; // of the library

// ------------------------------------------------------------------------------------------------------------ library

#define CUBLAS_FUNCTIONS(X)          \
    X(Create)                        \
    X(Destroy)                       \
    X(GetVersion)                    \
    X(GetStatusString)               \
    X(MatmulDescInit_internal)       \
    X(MatmulDescSetAttribute)        \
    X(MatrixLayoutInit_internal)     \
    X(MatmulPreferenceInit_internal) \
    X(MatmulPreferenceSetAttribute)  \
    X(MatmulAlgoGetHeuristic)        \
    X(Matmul)

// Everything that an algorithm is chosen by; compared as bytes. lda, ldb: of the copies; ldc: also of what is added.
struct product_shape {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t a_turned, b_turned, biased, adds, aligned; // aligned: c and what is added begin at multiples of 16 bytes
};

struct chosen_algorithm {
    product_shape shape;
    cublasLtMatmulAlgo_t algorithm;
};

struct cuda_cublas {
#define CUBLAS_MEMBER(name) decltype(&cublasLt##name) name;
    CUBLAS_FUNCTIONS(CUBLAS_MEMBER)
#undef CUBLAS_MEMBER
    cublasLtHandle_t handle;
    chosen_algorithm chosen[SHAPES];
    int count, last, oldest;
};

#define TEXT_OF(number) #number
#define NAME_OF(major) "libcublasLt.so." TEXT_OF(major)
static const char library_name[] = NAME_OF(CUBLAS_VER_MAJOR);

static kern_status find_functions(cuda_cublas *cublas, char *reason, size_t reason_size) {
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL); // it stays open: code of it stays on the device
    if (!library) {
        if (reason && reason_size > 0)
            snprintf(reason, reason_size,
                     "bf16 training needs cuBLASLt (NVIDIA's package libcublas-%d-%d, Debian's libcublaslt%d): %s",
                     __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, CUBLAS_VER_MAJOR, dlerror());
        return KERN_UNSUPPORTED;
    }
#define CUBLAS_FIND(name)                                                                  \
    {                                                                                      \
        void *found = dlsym(library, "cublasLt" #name);                                    \
        if (!found) {                                                                      \
            if (reason && reason_size > 0)                                                 \
                snprintf(reason, reason_size, "%s lacks cublasLt%s", library_name, #name); \
            return KERN_UNSUPPORTED;                                                       \
        }                                                                                  \
        memcpy(&cublas->name, &found, sizeof found);                                       \
    }
    CUBLAS_FUNCTIONS(CUBLAS_FIND)
#undef CUBLAS_FIND
    return KERN_OK;
}

kern_status cuda_cublas_open(cuda_cublas **out, char *reason, size_t reason_size) {
    cuda_cublas *cublas = (cuda_cublas *)calloc(1, sizeof *cublas);
    if (!cublas)
        return KERN_NO_MEMORY;
    kern_status status = find_functions(cublas, reason, reason_size);
    if (!status) {
        const cublasStatus_t made = cublas->Create(&cublas->handle);
        if (made != CUBLAS_STATUS_SUCCESS) {
            if (reason && reason_size > 0)
                snprintf(reason, reason_size, "%s: %s", library_name, cublas->GetStatusString(made));
            status = KERN_NO_DEVICE;
        }
    }
    if (status) {
        free(cublas);
        return status;
    }
    *out = cublas;
    return KERN_OK;
}

void cuda_cublas_close(cuda_cublas *cublas) {
    if (cublas)
        cublas->Destroy(cublas->handle);
    free(cublas);
}

size_t cuda_cublas_version(const cuda_cublas *cublas) {
    return cublas->GetVersion();
}

static kern_status status_of(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return KERN_OK;
    case CUBLAS_STATUS_ALLOC_FAILED:
        return KERN_NO_MEMORY;
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return KERN_UNSUPPORTED;
    case CUBLAS_STATUS_INVALID_VALUE:
        return KERN_INVALID;
    default:
        return KERN_DEVICE_LOST;
    }
}

// --------------------------------------------------------------------------------------------------------- algorithms

// A product as the library is told of it, its first operand our b.
struct description {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
};

template <typename T>
static cublasStatus_t set(const cuda_cublas *cublas, description *d, cublasLtMatmulDescAttributes_t what, T value) {
    return cublas->MatmulDescSetAttribute(&d->product, what, &value, sizeof value);
}

// A matrix that is (rows, columns) in rows of memory.
static cublasStatus_t lay_out(const cuda_cublas *cublas, cublasLtMatrixLayoutOpaque_t *layout, cudaDataType type,
                              int64_t rows, int64_t columns, int64_t ld) {
    return cublas->MatrixLayoutInit_internal(layout, sizeof *layout, type, (uint64_t)columns, (uint64_t)rows, ld);
}

static cublasStatus_t describe(const cuda_cublas *cublas, const product_shape &s, const float *bias, description *d) {
    cublasStatus_t status =
        cublas->MatmulDescInit_internal(&d->product, sizeof d->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = set(cublas, d, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(s.b_turned ? CUBLAS_OP_N : CUBLAS_OP_T));
    if (!status)
        status = set(cublas, d, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(s.a_turned ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (!status && s.biased)
        status = set(cublas, d, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
    if (!status && s.biased)
        status = set(cublas, d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void *)bias);
    if (!status)
        status = lay_out(cublas, &d->b, CUDA_R_16BF, s.b_turned ? s.k : s.n, s.b_turned ? s.n : s.k, s.ldb);
    if (!status)
        status = lay_out(cublas, &d->a, CUDA_R_16BF, s.a_turned ? s.k : s.m, s.a_turned ? s.m : s.k, s.lda);
    return status ? status : lay_out(cublas, &d->c, CUDA_R_32F, s.m, s.n, s.ldc);
}

static cublasStatus_t make_preference(const cuda_cublas *cublas, bool aligned, cublasLtMatmulPreferenceOpaque_t *p) {
    const uint32_t own = aligned ? (uint32_t)ALIGNED : (uint32_t)sizeof(float);
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        uint32_t value;
    } wishes[] = {{CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, ALIGNED},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, ALIGNED},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, own},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, own}};
    const uint64_t most = workspace_bytes;
    cublasStatus_t status = cublas->MatmulPreferenceInit_internal(p, sizeof *p);
    if (!status)
        status = cublas->MatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
    for (const auto &wish : wishes)
        if (!status)
            status = cublas->MatmulPreferenceSetAttribute(p, wish.what, &wish.value, sizeof wish.value);
    return status;
}

static kern_status ask(const cuda_cublas *cublas, const product_shape &shape, cublasLtMatmulAlgo_t *algorithm) {
    const float *const any_bias = (const float *)(uintptr_t)ALIGNED; // only its alignment is looked at
    description d;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    cublasStatus_t status = describe(cublas, shape, any_bias, &d);
    if (!status)
        status = make_preference(cublas, shape.aligned != 0, &preference);
    if (!status)
        status = cublas->MatmulAlgoGetHeuristic(cublas->handle, &d.product, &d.b, &d.a, &d.c, &d.c, &preference, 1,
                                                &best, &found);
    if (!status && found == 1)
        status = best.state;
    if (status || found != 1)
        return status ? status_of(status) : KERN_UNSUPPORTED;
    *algorithm = best.algo;
    return KERN_OK;
}

static kern_status algorithm_of(cuda_cublas *cublas, const product_shape &shape,
                                const cublasLtMatmulAlgo_t **algorithm) {
    for (int i = 0; i < cublas->count; i++) {
        const int at = (cublas->last + 1 + i) % cublas->count;
        if (memcmp(&cublas->chosen[at].shape, &shape, sizeof shape) == 0) {
            cublas->last = at;
            *algorithm = &cublas->chosen[at].algorithm;
            return KERN_OK;
        }
    }
    cublasLtMatmulAlgo_t best = {};
    const kern_status status = ask(cublas, shape, &best);
    if (status)
        return status;
    const int at = cublas->count < SHAPES ? cublas->count++ : cublas->oldest;
    if (cublas->count == SHAPES)
        cublas->oldest = (at + 1) % SHAPES;
    cublas->chosen[at] = {shape, best};
    cublas->last = at;
    *algorithm = &cublas->chosen[at].algorithm;
    return KERN_OK;
}

// ----------------------------------------------------------------------------------------------------------- products

static bool is_aligned(const void *p) {
    return (uintptr_t)p % ALIGNED == 0;
}

// What a product reads of an operand: i [i0, i0 + i) and k [k0, k0 + k); one of the two is sliced, as rows of memory.
struct operand_slice {
    int64_t i0, i, all_i, k0, k, all_k;
};

struct side {
    const __nv_bfloat16 *from;
    int64_t ld;
};

static kern_status side_of(const cuda_step *step, cuda_copies *copies, char *room, const cuda_operand &o,
                           const operand_slice &s, const cuda_copy *keep, cuda_copy *copy, side *side) {
    const int32_t rows = (int32_t)(o.turned ? s.k : s.i), columns = (int32_t)(o.turned ? s.all_i : s.all_k);
    *copy = {o.p, o.turned ? s.k0 : s.i0, o.ld, rows, columns, o.bf16, NULL, 0};
    const kern_status status = cuda_copy_operand(step, copies, room, copy, keep);
    *side = {(const __nv_bfloat16 *)copy->place + (o.turned ? 0 : s.k0), cuda_copy_ld(columns)};
    return status;
}

// The bias as the library takes it, in `room` where its own place is not aligned.
static kern_status align_bias(const cuda_step *step, float *room, int64_t n, const float **bias) {
    if (!*bias || is_aligned(*bias))
        return KERN_OK;
    if (n > BIAS_FLOATS)
        return KERN_UNSUPPORTED;
    const float *from = *bias;
    *bias = room;
    return cuda_status(cudaMemcpyAsync(room, from, sizeof(float) * (size_t)n, cudaMemcpyDeviceToDevice, step->stream));
}

static kern_status multiply(const cuda_step *step, char *workspace, const side &a, const side &b, product_shape shape,
                            const cuda_gemm_output &out) {
    const float one = 1, *added = out.residual ? out.residual : out.c, *bias = out.bias;
    const float beta = out.residual || out.accumulate ? 1.0f : 0.0f;
    cuda_cublas *cublas = step->cuda->cublas;
    const cublasLtMatmulAlgo_t *algorithm = NULL;
    description d;
    shape.lda = a.ld, shape.ldb = b.ld, shape.ldc = out.ldc;
    shape.biased = bias != NULL, shape.adds = beta != 0;
    shape.aligned = is_aligned(out.c) && is_aligned(added);
    kern_status status = align_bias(step, (float *)(workspace + workspace_bytes), shape.n, &bias);
    if (!status)
        status = algorithm_of(cublas, shape, &algorithm);
    if (!status)
        status = status_of(describe(cublas, shape, bias, &d));
    if (status)
        return status;
    return status_of(cublas->Matmul(cublas->handle, &d.product, &one, b.from, &d.b, a.from, &d.a, &beta, added, &d.c,
                                    out.c, &d.c, algorithm, workspace, workspace_bytes, step->stream));
}

size_t cuda_cublas_bytes(void) {
    return workspace_bytes + sizeof(float) * BIAS_FLOATS + cuda_copies_bytes();
}

static int64_t least_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}

kern_status cuda_cublas_run(const cuda_step *step, char *workspace, const cuda_gemm &g) {
    cuda_copies own = {}, *copies = step->copies ? step->copies : &own;
    char *room = cuda_copies_room(workspace);
    const int64_t m_each = g.a.turned ? g.m : cuda_copy_rows(g.k), n_each = g.b.turned ? g.n : cuda_copy_rows(g.k);
    const int64_t k_each = least_of(g.a.turned ? cuda_copy_rows(g.m) : g.k, g.b.turned ? cuda_copy_rows(g.n) : g.k);
    if (g.m < 1 || g.n < 1 || g.k < 1)
        return KERN_OK;
    if (!step->cuda->cublas || m_each < 1 || n_each < 1 || k_each < 1 || g.n > INT32_MAX || g.k > INT32_MAX)
        return KERN_UNSUPPORTED;
    kern_status status = KERN_OK;
    for (int64_t k0 = 0; k0 < g.k; k0 += k_each)
        for (int64_t m0 = 0; m0 < g.m; m0 += m_each)
            for (int64_t n0 = 0; !status && n0 < g.n; n0 += n_each) {
                const int64_t k = least_of(k_each, g.k - k0), m = least_of(m_each, g.m - m0);
                const int64_t n = least_of(n_each, g.n - n0);
                product_shape shape = {m, n, k, 0, 0, 0, g.a.turned, g.b.turned, 0, 0, 0};
                cuda_copy copy_a, copy_b;
                side a, b;
                status = side_of(step, copies, room, g.a, {m0, m, g.m, k0, k, g.k}, NULL, &copy_a, &a);
                if (!status)
                    status = side_of(step, copies, room, g.b, {n0, n, g.n, k0, k, g.k}, &copy_a, &copy_b, &b);
                if (!status)
                    status = multiply(step, workspace, a, b, shape, cuda_gemm_output_of(g, m0, m, n0, n, k0 == 0));
            }
    return status;
}
