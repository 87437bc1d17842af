// SPDX-License-Identifier: Apache-2.0
// Measures the operations of a training step on a device at the shapes of a model 768 wide, one Markdown table: forward
// products, the backward of every operation around the mixers, the head, the optimizer.
//
// Operands are random numbers in memory of their own, larger together than any cache. A round measures a copy of 1 GiB
// of them, then the launches; figures are medians over the rounds. The floor of an operation is the larger of two
// times: of its operands, each read or written once, at the rate of that copy, and of its products at the rate that
// --tflops says.
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/measure.h"

enum { WIDTH = 768, INNER = 2048, HEADS = 6, VOCABULARY = 32000, TILE = 2048, LENGTH = 2048, ROUNDS_MAX = 99 };
enum { SUBJECTS_MAX = 48, RANDOM = 1 << 20, COPY = 1 << 28 };

typedef union arguments {
    kern_linear_args linear;
    kern_linear_backward_input_args input;
    kern_linear_backward_weight_args weight;
    kern_head_loss_args head;
    kern_rmsnorm_backward_args norm;
    kern_l2norm_backward_args l2norm;
    kern_glu_backward_args glu;
    kern_short_conv_backward_args conv;
    kern_gates_backward_args gates;
    kern_attention_args attention;
    kern_attention_backward_args attention_backward;
    kern_rglru_backward_args rglru;
    kern_embed_backward_args embed;
    kern_adamw_args adamw;
    kern_square_sum_args squares;
} arguments;

typedef struct subject {
    const char *name;
    kern_op op;
    arguments args;
    double bytes, flops;
} subject;

typedef struct bench {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    float *random, *copy[2];
    int32_t tokens;
    subject subject[SUBJECTS_MAX];
    int subjects, rounds;
    double flops, least_seconds;
    const char *what;
} bench;

// ---------------------------------------------------------------------------------------------------------- operands

// Device memory of random numbers in [-1, 1).
static float *numbers(const bench *b, size_t count) {
    float *made = NULL;
    check(kern_alloc(b->device, count * sizeof *made, (void **)&made), "operands");
    for (size_t at = 0; at < count; at += RANDOM)
        check(kern_copy(b->stream, made + at, b->random, sizeof *made * (count - at < RANDOM ? count - at : RANDOM)),
              "operands");
    return made;
}

// (tokens, width)
static kern_ptr activation(const bench *b, int32_t width) {
    return (kern_ptr){.f = numbers(b, (size_t)b->tokens * (size_t)width)};
}

static kern_ptr parameter(const bench *b, size_t count) {
    return (kern_ptr){.f = numbers(b, count)};
}

static kern_ptr matrix(const bench *b, int32_t rows, int32_t cols) {
    const kern_weight_desc desc = {
        .dtype = KERN_F32, .rows = rows, .cols = cols, .master = numbers(b, (size_t)rows * (size_t)cols)};
    kern_ptr made = {.ref = 0};
    check(kern_weight_create(b->device, &desc, &made.w), "weights");
    return made;
}

static void make_random(bench *b) {
    float *host = malloc(RANDOM * sizeof *host);
    uint64_t seed = 1;
    if (!host)
        check(KERN_NO_MEMORY, "operands");
    for (int i = 0; i < RANDOM; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        host[i] = (float)((double)(seed >> 11) * 0x1p-52 - 1);
    }
    check(kern_alloc(b->device, RANDOM * sizeof *host, (void **)&b->random), "operands");
    check(kern_upload(b->stream, b->random, host, RANDOM * sizeof *host), "operands");
    check(kern_synchronize(b->stream), "operands");
    free(host);
}

// ---------------------------------------------------------------------------------------------------------- subjects

// passes: floats a token that are read or written once; more: floats beside them.
static void add(bench *b, const char *name, kern_op op, arguments args, double passes, double more, double flops) {
    if (b->what && !strstr(name, b->what))
        return;
    b->subject[b->subjects++] = (subject){name, op, args, 4 * (passes * b->tokens + more), flops};
}

static void add_linear(bench *b, const char *const names[3], int32_t rows, int32_t cols) {
    const kern_ptr x = activation(b, cols), y = activation(b, rows), weight = matrix(b, rows, cols);
    const double size = (double)rows * cols, flops = 2 * size * b->tokens;
    const kern_linear_args forward = {.x = x, .weight = weight, .y = y, .cols = cols, .rows = rows};
    const kern_linear_backward_input_args input = {.dy = y, .weight = weight, .dx = x, .cols = cols, .rows = rows};
    const kern_linear_backward_weight_args gradient = {
        .x = x, .dy = y, .grad_weight = parameter(b, (size_t)rows * (size_t)cols), .cols = cols, .rows = rows};
    add(b, names[0], KERN_OP_LINEAR, (arguments){.linear = forward}, rows + cols, size, flops);
    add(b, names[1], KERN_OP_LINEAR_BACKWARD_INPUT, (arguments){.input = input}, rows + cols, size, flops);
    add(b, names[2], KERN_OP_LINEAR_BACKWARD_WEIGHT, (arguments){.weight = gradient}, rows + cols, 2 * size, flops);
}

static void add_products(bench *b) {
    static const struct {
        const char *names[3];
        int32_t rows, cols;
    } layers[] = {
        {{"linear 768 x 768", "linear 768 x 768, dx", "linear 768 x 768, dW"}, WIDTH, WIDTH},
        {{"linear 1536 x 768", "linear 1536 x 768, dx", "linear 1536 x 768, dW"}, 2 * WIDTH, WIDTH},
        {{"linear 768 x 1536", "linear 768 x 1536, dx", "linear 768 x 1536, dW"}, WIDTH, 2 * WIDTH},
        {{"linear 2048 x 768", "linear 2048 x 768, dx", "linear 2048 x 768, dW"}, INNER, WIDTH},
        {{"linear 768 x 2048", "linear 768 x 2048, dx", "linear 768 x 2048, dW"}, WIDTH, INNER},
    };
    for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++)
        add_linear(b, layers[i].names, layers[i].rows, layers[i].cols);
    const double size = (double)VOCABULARY * WIDTH;
    const kern_head_loss_args head = {.x = activation(b, WIDTH),
                                      .weight = matrix(b, VOCABULARY, WIDTH),
                                      .loss = activation(b, 1),
                                      .dx = activation(b, WIDTH),
                                      .grad_weight = parameter(b, (size_t)size),
                                      .tile = parameter(b, (size_t)TILE * VOCABULARY),
                                      .width = WIDTH,
                                      .vocabulary = VOCABULARY,
                                      .tile_tokens = TILE};
    add(b, "head 32000 x 768, loss and gradients", KERN_OP_HEAD_LOSS, (arguments){.head = head}, 2 * WIDTH, 3 * size,
        6 * size * b->tokens);
    kern_head_loss_args taught = head;
    taught.teacher_x = activation(b, WIDTH), taught.teacher_weight = matrix(b, VOCABULARY, WIDTH);
    taught.divergence = activation(b, 1), taught.teacher_tile = parameter(b, (size_t)TILE * VOCABULARY);
    taught.teacher_width = WIDTH, taught.temperature = 2, taught.loss_share = taught.divergence_share = 1;
    add(b, "head 32000 x 768, losses with a teacher and gradients", KERN_OP_HEAD_LOSS, (arguments){.head = taught},
        3 * WIDTH, 4 * size, 8 * size * b->tokens);
}

static void add_norms(bench *b) {
    const kern_ptr x = activation(b, INNER), dy = activation(b, INNER), dx = activation(b, INNER);
    const kern_ptr up = activation(b, INNER), dup = activation(b, INNER);
    const kern_rmsnorm_backward_args norm = {.x = x,
                                             .weight = parameter(b, WIDTH),
                                             .dy = dy,
                                             .dx = dx,
                                             .grad_weight = parameter(b, WIDTH),
                                             .groups = 1,
                                             .width = WIDTH,
                                             .eps = 1e-6f,
                                             .accumulate = 1};
    kern_rmsnorm_backward_args gated = norm;
    gated.gate = up, gated.dgate = dup, gated.groups = HEADS, gated.width = WIDTH / HEADS, gated.accumulate = 0;
    gated.activation = KERN_SILU;
    const kern_l2norm_backward_args l2 = {x, dy, dx, HEADS, WIDTH / HEADS, 1e-6f};
    const kern_glu_backward_args glu = {x, up, dy, dx, dup, INNER, KERN_SILU};
    add(b, "norm, backward", KERN_OP_RMSNORM_BACKWARD, (arguments){.norm = norm}, 4 * WIDTH, 0, 0);
    add(b, "gated norm of heads, backward", KERN_OP_RMSNORM_BACKWARD, (arguments){.norm = gated}, 5 * WIDTH, 0, 0);
    add(b, "L2 norm of heads, backward", KERN_OP_L2NORM_BACKWARD, (arguments){.l2norm = l2}, 3 * WIDTH, 0, 0);
    add(b, "gated product, backward", KERN_OP_GLU_BACKWARD, (arguments){.glu = glu}, 5 * INNER, 0, 0);
}

static void add_mixers(bench *b) {
    const kern_ptr x = activation(b, WIDTH), dy = activation(b, WIDTH), dx = activation(b, WIDTH);
    const kern_short_conv_backward_args conv = {.x = x,
                                                .weight = parameter(b, (size_t)WIDTH * 4),
                                                .dy = dy,
                                                .dx = dx,
                                                .grad_weight = parameter(b, (size_t)WIDTH * 4),
                                                .channels = WIDTH,
                                                .taps = 4,
                                                .activation = KERN_SILU};
    const kern_gates_backward_args gates = {
        .a = activation(b, HEADS),
        .A_log = parameter(b, HEADS),
        .dt_bias = parameter(b, HEADS),
        .dg = activation(b, HEADS),
        .da = activation(b, HEADS),
        .grad_A_log = parameter(b, HEADS),
        .grad_dt_bias = parameter(b, HEADS),
        .gates = {
            .heads = HEADS, .channels = 1, .decay_law = KERN_DECAY_LAW_EXPONENTIAL, .write_law = KERN_WRITE_LAW_NONE}};
    const kern_rglru_backward_args rglru = {.x = x,
                                            .input_gate = activation(b, WIDTH),
                                            .recurrence_gate = activation(b, WIDTH),
                                            .recurrent_param = parameter(b, WIDTH),
                                            .h = activation(b, WIDTH),
                                            .dh = dy,
                                            .dx = dx,
                                            .dinput_gate = activation(b, WIDTH),
                                            .drecurrence_gate = activation(b, WIDTH),
                                            .grad_recurrent_param = parameter(b, WIDTH),
                                            .width = WIDTH};
    add(b, "convolution, backward", KERN_OP_SHORT_CONV_BACKWARD, (arguments){.conv = conv}, 3 * WIDTH, 0, 0);
    add(b, "gates, backward", KERN_OP_GATES_BACKWARD, (arguments){.gates = gates}, 3 * HEADS, 0, 0);
    add(b, "RG-LRU, backward", KERN_OP_RGLRU_BACKWARD, (arguments){.rglru = rglru}, 8 * WIDTH, 0, 0);
}

static void add_attention(bench *b) {
    const kern_attention shape = {.heads = HEADS, .kv_heads = HEADS, .head_width = WIDTH / HEADS, .scale = 0.1f};
    const kern_ptr q = activation(b, WIDTH), k = activation(b, WIDTH), v = activation(b, WIDTH);
    const kern_ptr o = activation(b, WIDTH), lse = activation(b, HEADS);
    const kern_attention_args forward = {.q = q, .k = k, .v = v, .o = o, .lse = lse, .attention = shape};
    const kern_attention_backward_args backward = {.q = q,
                                                   .k = k,
                                                   .v = v,
                                                   .o = o,
                                                   .lse = lse,
                                                   .d_o = activation(b, WIDTH),
                                                   .dq = activation(b, WIDTH),
                                                   .dk = activation(b, WIDTH),
                                                   .dv = activation(b, WIDTH),
                                                   .attention = shape};
    const double product = (double)b->tokens * LENGTH * WIDTH; // of scores: half of all pairs
    add(b, "attention", KERN_OP_ATTENTION, (arguments){.attention = forward}, 4 * WIDTH, 0, 2 * product);
    add(b, "attention, backward", KERN_OP_ATTENTION_BACKWARD, (arguments){.attention_backward = backward}, 8 * WIDTH, 0,
        5 * product);
}

// An optimizer's runs, over vectors of `count` floats, a multiple of a run's.
static kern_ptr runs_over(const bench *b, float *grad, int64_t count) {
    float *weight = numbers(b, (size_t)count), *m = numbers(b, (size_t)count), *v = numbers(b, (size_t)count);
    const size_t runs = (size_t)(count / KERN_ADAMW_RUN), bytes = runs * sizeof(kern_adamw_run);
    kern_adamw_run *host = malloc(bytes);
    kern_ptr made = {.ref = 0};
    if (!host)
        check(KERN_NO_MEMORY, "operands");
    for (size_t r = 0; r < runs; r++) {
        const size_t at = r * KERN_ADAMW_RUN;
        host[r] = (kern_adamw_run){.parameter = weight + at,
                                   .grad = grad + at,
                                   .m = m + at,
                                   .v = v + at,
                                   .count = KERN_ADAMW_RUN,
                                   .weight_decay = 0.1f};
    }
    check(kern_zero(b->stream, v, sizeof *v * (size_t)count), "operands");
    check(kern_alloc(b->device, bytes, &made.p), "operands");
    check(kern_upload(b->stream, made.p, host, bytes), "operands");
    check(kern_synchronize(b->stream), "operands");
    free(host);
    return made;
}

static void add_rest(bench *b) {
    const int64_t count = 1 << 27;
    const kern_ptr grad = parameter(b, (size_t)count);
    const kern_adamw_args adamw = {.run = runs_over(b, grad.f, count),
                                   .count = count,
                                   .runs = (int32_t)(count / KERN_ADAMW_RUN),
                                   .lr = 1e-4f,
                                   .beta1 = 0.9f,
                                   .beta2 = 0.98f,
                                   .eps = 1e-8f,
                                   .correction1 = 1,
                                   .correction2 = 1};
    const kern_square_sum_args squares = {grad, parameter(b, 2), count};
    const kern_embed_backward_args embed = {activation(b, WIDTH), parameter(b, (size_t)VOCABULARY * WIDTH), WIDTH, 1};
    add(b, "embedding, backward", KERN_OP_EMBED_BACKWARD, (arguments){.embed = embed}, 3 * WIDTH, 0, 0);
    add(b, "AdamW, 134M parameters", KERN_OP_ADAMW, (arguments){.adamw = adamw}, 0, 7.0 * (double)count, 0);
    add(b, "gradient norm, 134M", KERN_OP_SQUARE_SUM, (arguments){.squares = squares}, 0, (double)count, 0);
}

// ------------------------------------------------------------------------------------------------------- measurements

typedef struct work {
    const bench *b;
    const subject *s;
} work;

static void run(void *context) {
    const work *w = context;
    check(kern_launch(w->b->stream, w->s->op, w->b->rows, &w->s->args), w->s->name);
}

static void run_copy(void *context) {
    const work *w = context;
    check(kern_copy(w->b->stream, w->b->copy[0], w->b->copy[1], sizeof(float) * COPY), "copy");
}

static void print_subject(const bench *b, const subject *s) {
    double seconds[ROUNDS_MAX], floors[ROUNDS_MAX];
    check(kern_reserve(b->device, s->op, &s->args), s->name);
    work w = {b, s};
    int launches = 1, copies = 1;
    run(&w); // once untimed: modules are loaded
    for (int round = 0; round < b->rounds; round++) {
        const double rate =
            2 * sizeof(float) * (double)COPY / time_call(b->stream, b->least_seconds, run_copy, &w, &copies);
        const double memory = s->bytes / rate, products = s->flops / b->flops;
        floors[round] = memory > products ? memory : products;
        seconds[round] = time_call(b->stream, b->least_seconds, run, &w, &launches);
    }
    const double taken = median(seconds, b->rounds), floor = median(floors, b->rounds);
    printf("| %s | %.1f | %.1f | %.2f | %.1f |\n", s->name, 1e6 * taken, 1e6 * floor, taken / floor,
           1e-12 * s->flops / taken);
    fflush(stdout);
}

static void fill_rows(bench *b) {
    const int32_t rows = b->tokens / LENGTH > 0 ? b->tokens / LENGTH : 1;
    b->rows->merge = true;
    for (int32_t r = 0; r < rows; r++)
        b->rows->row[r] = (kern_row){.kind = KERN_ROW_PROMPT,
                                     .slot = -1,
                                     .token0 = b->tokens / rows * r,
                                     .length = b->tokens / rows,
                                     .page0 = -1};
    b->rows->n_rows = rows;
    b->rows->n_tokens = b->tokens;
    for (int32_t t = 0; t < b->tokens; t++) { // common ids are more frequent
        b->rows->id[t] = (int32_t)((int64_t)t * t % VOCABULARY * (t % 7) / 7);
        b->rows->target[t] = t % VOCABULARY;
        b->rows->target_weight[t] = 1.0f / (float)b->tokens;
    }
    check(kern_rows_prepare(b->stream, b->rows), "rows");
}

static void read_options(bench *b, int argc, char **argv, kern_device_options *device) {
    static const struct option known[] = {{"device", required_argument, NULL, 'd'},
                                          {"rounds", required_argument, NULL, 'r'},
                                          {"tokens", required_argument, NULL, 't'},
                                          {"tflops", required_argument, NULL, 'f'},
                                          {"what", required_argument, NULL, 'w'},
                                          {"bf16", no_argument, NULL, 'b'},
                                          {NULL, 0, NULL, 0}};
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;) {
        switch (option) {
        case 'd':
            device->name = optarg;
            break;
        case 'r':
            b->rounds = atoi(optarg);
            break;
        case 't':
            b->tokens = atoi(optarg) / LENGTH * LENGTH;
            break;
        case 'f':
            b->flops = 1e12 * atof(optarg);
            break;
        case 'w':
            b->what = optarg;
            break;
        case 'b':
            device->fast = device->trains = true;
            break;
        default:
            fprintf(stderr, "bench_gradients [--device NAME] [--bf16] [--rounds N] [--tokens N] [--tflops N] "
                            "[--what WORDS]\n");
            exit(2);
        }
    }
    b->rounds = b->rounds < 1 ? 1 : b->rounds > ROUNDS_MAX ? ROUNDS_MAX : b->rounds;
    b->tokens = b->tokens < LENGTH ? LENGTH : b->tokens;
}

int main(int argc, char **argv) {
    bench b = {.rounds = 5, .tokens = 16 * LENGTH, .flops = 800e12, .least_seconds = 0.02};
    kern_device_options device = {.name = "cuda:0"};
    char reason[256] = "";
    read_options(&b, argc, argv, &device);
    if (kern_device_open(&device, &b.device, reason, sizeof reason) != KERN_OK) {
        fprintf(stderr, "bench_gradients: %s: %s\n", device.name, reason);
        return 1;
    }
    check(kern_stream_open(b.device, &b.stream), "stream");
    check(kern_rows_create(b.device, b.tokens / LENGTH, b.tokens, 1, 1, 1, 1, &b.rows), "rows");
    make_random(&b);
    for (int i = 0; i < 2; i++)
        b.copy[i] = numbers(&b, COPY);
    fill_rows(&b);
    add_products(&b);
    add_norms(&b);
    add_mixers(&b);
    add_attention(&b);
    add_rest(&b);
    printf(
        "%s, %d tokens, %s\n\n| operation | us | floor, us | ratio | TFLOP/s |\n| --- | ---: | ---: | ---: | ---: |\n",
        kern_device_describe(b.device)->description, b.tokens, device.fast ? "bf16" : "float32");
    for (int i = 0; i < b.subjects; i++)
        print_subject(&b, &b.subject[i]);
    kern_rows_free(b.rows);
    kern_stream_close(b.stream);
    kern_device_close(b.device); // the operands end with the process
    return 0;
}
