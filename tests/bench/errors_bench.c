// SPDX-License-Identifier: Apache-2.0
// What the Mesa layer's solver leaves of error on a device, by its settings: x and o of a prompt against the exact
// solution in double (Cholesky at every token), by relative norm, one Markdown table. Nothing is timed.
//
// q, k and v are numbers that bf16 holds, so that kernels which take bf16 can be given the very same: --operands FILE
// writes them as they lie, q, k, v (T, H, D), log decays and write weights (T, H), the diagonal added (H, D) in
// float32, then the exact o (T, H, D) in double.
#include <getopt.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/ref/mesa.h"
#include "tests/bench/measure.h"

enum { TOKENS = 2048, HEADS = 6, WIDTH = 128, VECTORS = TOKENS * HEADS * WIDTH, SCALARS = TOKENS * HEADS };
static const float lambda_bound = 0.25f;

typedef struct setting {
    const char *name;
    kern_solver solver;
} setting;

static const setting settings[] = {
    {"10 steps", {KERN_SOLVE_STEPS, 10, 0}},
    {"20 steps", {KERN_SOLVE_STEPS, 20, 0}},
    {"30 steps", {KERN_SOLVE_STEPS, 30, 0}},
    {"tolerance 1e-1", {KERN_SOLVE_TOLERANCE, 30, 1e-1f}},
    {"tolerance 1e-2", {KERN_SOLVE_TOLERANCE, 30, 1e-2f}},
    {"tolerance 1e-3", {KERN_SOLVE_TOLERANCE, 30, 1e-3f}},
    {"tolerance 1e-4", {KERN_SOLVE_TOLERANCE, 30, 1e-4f}},
    {"tolerance 1e-5", {KERN_SOLVE_TOLERANCE, 64, 1e-5f}},
};

// q, k, v, g, beta, lambda's parameters; x and o exactly.
enum { Q, K, V, G, BETA, PARAMS, INPUTS, X = INPUTS, O, ARRAYS };
static const size_t count_of[ARRAYS] = {VECTORS, VECTORS, VECTORS, SCALARS, SCALARS, HEADS *WIDTH, VECTORS, VECTORS};

typedef struct prompt {
    float *in[INPUTS];
    double *array[ARRAYS]; // the inputs again, and what is exact
} prompt;

// ------------------------------------------------------------------------------------------------------------ operands

static void *claim(size_t count, size_t size) {
    void *memory = calloc(count, size);
    check(memory ? KERN_OK : KERN_NO_MEMORY, "operands");
    return memory;
}

static float uniform(uint64_t *seed) { // [0, 1)
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*seed >> 11) * 0x1p-53);
}

static float as_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Queries and keys of about unit length with a common direction, as a layer's are.
static void make_keys(float *keys, uint64_t *seed) {
    for (size_t at = 0; at < VECTORS; at += WIDTH) {
        double square = 0;
        for (int i = 0; i < WIDTH; i++) {
            keys[at + (size_t)i] = 1.5f * uniform(seed) - 0.5f;
            square += (double)keys[at + (size_t)i] * keys[at + (size_t)i];
        }
        for (int i = 0; i < WIDTH; i++)
            keys[at + (size_t)i] = as_bf16((float)(keys[at + (size_t)i] / sqrt(square)));
    }
}

static prompt make_prompt(void) {
    prompt p = {0};
    uint64_t seed = 1;
    for (int i = 0; i < INPUTS; i++)
        p.in[i] = claim(count_of[i], sizeof(float));
    make_keys(p.in[Q], &seed);
    make_keys(p.in[K], &seed);
    for (size_t i = 0; i < VECTORS; i++)
        p.in[V][i] = as_bf16(2 * uniform(&seed) - 1);
    for (size_t i = 0; i < SCALARS; i++) {
        p.in[G][i] = -0.1f * uniform(&seed);
        p.in[BETA][i] = uniform(&seed);
    }
    for (size_t i = 0; i < HEADS * WIDTH; i++)
        p.in[PARAMS][i] = 2 * uniform(&seed) - 1;
    for (int i = 0; i < ARRAYS; i++) {
        p.array[i] = claim(count_of[i], sizeof(double));
        for (size_t j = 0; i < INPUTS && j < count_of[i]; j++)
            p.array[i][j] = p.in[i][j];
    }
    return p;
}

static void solve_exactly(const prompt *p) {
    const kern_mesa mesa = {HEADS, WIDTH, WIDTH, lambda_bound, KERN_STORE_F32};
    const kern_ref_mesa_inputs in = {p->array[Q],    p->array[K],      p->array[V], p->array[G],
                                     p->array[BETA], p->array[PARAMS], NULL};
    const kern_solver exact = {KERN_SOLVE_EXACT, 0, 0};
    double *keys = claim(HEADS * WIDTH * WIDTH, sizeof *keys), *values = claim(HEADS * WIDTH * WIDTH, sizeof *values);
    kern_ref_mesa(&mesa, TOKENS, &in, &exact, keys, values, p->array[X], p->array[O]);
    free(keys);
    free(values);
}

static void write_operands(const prompt *p, const char *path) {
    FILE *file = fopen(path, "wb");
    bool written = file != NULL;
    for (int i = 0; written && i < PARAMS; i++)
        written = fwrite(p->in[i], sizeof(float), count_of[i], file) == count_of[i];
    for (size_t i = 0; written && i < HEADS * WIDTH; i++) {
        const float lambda = (float)log1p(exp(p->array[PARAMS][i])) + lambda_bound;
        written = fwrite(&lambda, sizeof lambda, 1, file) == 1;
    }
    written = written && fwrite(p->array[O], sizeof(double), VECTORS, file) == VECTORS;
    if ((file && fclose(file)) || !written) {
        fprintf(stderr, "bench_errors: %s cannot be written\n", path);
        exit(1);
    }
}

// ----------------------------------------------------------------------------------------------------------- on a
// device

typedef struct bench {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    float *in[INPUTS], *x, *o;
    kern_solve_report *report;
} bench;

static float *place(const bench *b, size_t count, const float *from) {
    float *made = NULL;
    check(kern_alloc(b->device, count * sizeof *made, (void **)&made), "operands");
    if (from)
        check(kern_upload(b->stream, made, from, count * sizeof *made), "operands");
    check(kern_synchronize(b->stream), "operands");
    return made;
}

static void open_bench(bench *b, const char *device, bool fast, const prompt *p) {
    char reason[256] = "";
    const kern_status status =
        kern_device_open(&(kern_device_options){.name = device, .fast = fast}, &b->device, reason, sizeof reason);
    if (status != KERN_OK) {
        fprintf(stderr, "bench_errors: %s: %s\n", kern_status_text(status), reason);
        exit(1);
    }
    check(kern_stream_open(b->device, &b->stream), "stream");
    check(kern_rows_create(b->device, 1, TOKENS, 0, 0, 0, 0, &b->rows), "rows");
    for (int i = 0; i < INPUTS; i++)
        b->in[i] = place(b, count_of[i], p->in[i]);
    b->x = place(b, VECTORS, NULL);
    b->o = place(b, VECTORS, NULL);
    check(kern_alloc(b->device, SCALARS * sizeof *b->report, (void **)&b->report), "reports");
}

static void close_bench(bench *b) {
    for (int i = 0; i < INPUTS; i++)
        kern_free(b->device, b->in[i]);
    kern_free(b->device, b->x);
    kern_free(b->device, b->o);
    kern_free(b->device, b->report);
    kern_rows_free(b->rows);
    kern_stream_close(b->stream);
    kern_device_close(b->device);
}

static void run(const bench *b, const kern_solver *solver) {
    kern_rows *rows = b->rows;
    rows->n_rows = 1;
    rows->n_tokens = TOKENS;
    rows->n_generated = 0;
    rows->row[0] = (kern_row){.kind = KERN_ROW_PROMPT, .slot = -1, .length = TOKENS, .page0 = -1, .solver = *solver};
    for (int t = 0; t < TOKENS; t++)
        rows->target[t] = -1;
    const kern_mesa_args args = {.q.f = b->in[Q],
                                 .k.f = b->in[K],
                                 .v.f = b->in[V],
                                 .g.f = b->in[G],
                                 .beta.f = b->in[BETA],
                                 .lambda_params.f = b->in[PARAMS],
                                 .o.f = b->o,
                                 .x.f = b->x,
                                 .report.p = b->report,
                                 .mesa = {HEADS, WIDTH, WIDTH, lambda_bound, KERN_STORE_F32}};
    check(kern_reserve(b->device, KERN_OP_MESA, &args), "mesa");
    check(kern_rows_prepare(b->stream, rows), "rows");
    check(kern_launch(b->stream, KERN_OP_MESA, rows, &args), "mesa");
    check(kern_synchronize(b->stream), "mesa");
}

static double error_of(const bench *b, const float *on_device, const double *exact, float *host) {
    double difference = 0, norm = 0;
    check(kern_download(b->stream, host, on_device, VECTORS * sizeof *host), "results");
    check(kern_synchronize(b->stream), "results");
    for (size_t i = 0; i < VECTORS; i++) {
        difference += (host[i] - exact[i]) * (host[i] - exact[i]);
        norm += exact[i] * exact[i];
    }
    return sqrt(difference / norm);
}

int main(int argc, char **argv) {
    static const struct option known[] = {{"device", required_argument, NULL, 'd'},
                                          {"operands", required_argument, NULL, 'o'},
                                          {"bf16", no_argument, NULL, 'f'},
                                          {0}};
    const char *device = "cpu", *path = NULL;
    bool fast = false, valid = true;
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        device = option == 'd' ? optarg : device;
        path = option == 'o' ? optarg : path;
        fast = fast || option == 'f';
        valid = valid && option != '?';
    }
    if (!valid || optind != argc) {
        fprintf(stderr, "usage: bench_errors [--device NAME] [--bf16] [--operands FILE]\n");
        return 2;
    }
    bench b = {0};
    prompt p = make_prompt();
    float *host = claim(VECTORS, sizeof *host);
    open_bench(&b, device, fast, &p);
    solve_exactly(&p);
    if (path)
        write_operands(&p, path);
    printf(
        "%s%s; 1 x %d tokens, %d heads of %d\n\n| solver | steps | error of x | error of o |\n|---|---:|---:|---:|\n",
        kern_device_describe(b.device)->description, fast ? ", bf16" : "", (int)TOKENS, (int)HEADS, (int)WIDTH);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        run(&b, &settings[i].solver);
        const double x = error_of(&b, b.x, p.array[X], host), o = error_of(&b, b.o, p.array[O], host);
        printf("| %s | %.1f | %.1e | %.1e |\n", settings[i].name, mean_steps(b.stream, b.report, SCALARS), x, o);
    }
    close_bench(&b);
    for (int i = 0; i < ARRAYS; i++) {
        free(i < INPUTS ? p.in[i] : NULL);
        free(p.array[i]);
    }
    free(host);
    return 0;
}
