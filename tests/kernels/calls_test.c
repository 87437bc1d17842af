// SPDX-License-Identifier: Apache-2.0
// How the CPU runs a plan's calls: which neighbouring products run as one, and that this changes no bit.
//
// Known sequences are held to the parts that they make, as the device's table sees them. Sequences drawn at random, of
// products and rotations whose operands share, follow and overlap each other in every way, leave in memory what the
// same launches one by one leave: steps of generated tokens, prompts, and both, with weights of every kind.
#include "kernels/cpu/cpu.h"
#include "tests/kernels/kernel_test.h"

enum { COLS = 64, ROWS = 96, HEAD = 32, TOKENS = 24, GROUPS = 2, MOST_CALLS = 14 };
enum { STRETCH = TOKENS * GROUPS * ROWS, ARENA = 5 * STRETCH, NOWHERE = -1 };
enum { F32, BF16, Q8, Q4, Q4_MINIMUM, KINDS, TWO = 2, WEIGHTS = KINDS * TWO, BIAS = WEIGHTS, FREQUENCY, PARAMS };
_Static_assert((int)COLS < (int)ROWS && STRETCH * 4 % 64 == 0, "a stretch holds any operand");

typedef struct program_call {
    bool turns;    // a rotation of y
    int weight;    // of WEIGHTS
    int x, y, add; // floats from the arena's begin, multiples of 16; add: the residual, or NOWHERE
    bool biased;
    int rows, row0, groups;
} program_call;

typedef struct program {
    program_call call[MOST_CALLS];
    int calls;
} program;

typedef struct fixture {
    kernel_test test;
    void *param[PARAMS];
    const float *x;   // (ARENA): what the memory holds before
    float *memory[2]; // (ARENA): the plan's, the launches'
} fixture;

// ------------------------------------------------------------------------------------------------------------- weights

static kern_weight *make_weight(kernel_test *test, int kind) {
    const size_t count = (size_t)ROWS * COLS, scales = count / KERN_QUANT_BLOCK;
    const kern_dtype dtypes[KINDS] = {KERN_F32, KERN_BF16, KERN_Q8, KERN_Q4, KERN_Q4};
    float *values = kernel_test_floats(test, count, -0.2, 0.2);
    uint16_t *narrow = kernel_test_bytes(test, count * sizeof *narrow), *scale = narrow + count / 2;
    kern_weight *weight = NULL;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        narrow[i] = (uint16_t)(bits >> 16);
    }
    for (size_t i = 0; kind >= Q8 && i < 2 * scales; i++) // 2^-9 .. 2^-7; what is before them are the codes
        scale[i] = (uint16_t)((6 + scale[i] % 3) << 10 | (scale[i] & 0x3ff));
    const kern_weight_desc desc = {.dtype = dtypes[kind],
                                   .rows = ROWS,
                                   .cols = COLS,
                                   .host = kind == F32 ? (const void *)values : narrow,
                                   .scale = kind >= Q8 ? scale : NULL,
                                   .minimum = kind == Q4_MINIMUM ? scale + scales : NULL};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &weight), KERN_OK);
    return weight;
}

static bool open_fixture(fixture *f, int device) {
    memset(f, 0, sizeof *f);
    if (!kernel_test_open(&f->test, device, "cpu"))
        return false;
    for (int i = 0; i < WEIGHTS; i++)
        f->param[i] = make_weight(&f->test, i / TWO);
    f->param[BIAS] = kernel_test_floats(&f->test, ROWS, -1, 1);
    f->x = kernel_test_floats(&f->test, ARENA, -1, 1);
    f->param[FREQUENCY] = kernel_test_floats(&f->test, HEAD / 2, 0, 1);
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(kern_alloc(f->test.device, ARENA * sizeof(float), (void **)&f->memory[i]), KERN_OK);
    return true;
}

static void close_fixture(fixture *f) {
    for (int i = 0; i < WEIGHTS; i++)
        kern_weight_free(f->param[i]);
    for (int i = 0; i < 2; i++)
        kern_free(f->test.device, f->memory[i]);
    kernel_test_close(&f->test);
}

// --------------------------------------------------------------------------------------------------------------- calls

static kern_ptr param(const fixture *f, const float *memory, int which) {
    return memory ? (kern_ptr){.p = f->param[which]} : kern_ref(KERN_CLASS_PARAM, (uint64_t)which);
}

static kern_ptr place(float *memory, int at) {
    if (at == NOWHERE)
        return (kern_ptr){.ref = 0};
    return memory ? (kern_ptr){.f = memory + at} : kern_ref(KERN_CLASS_SCRATCH, (uint64_t)at * sizeof(float));
}

// Into a plan (memory NULL), or launched on the memory.
static void emit(fixture *f, const program *p, float *memory, kern_plan *plan) {
    for (int i = 0; i < p->calls; i++) {
        const program_call *c = &p->call[i];
        const kern_rope_args turn = {
            place(memory, c->y), param(f, memory, FREQUENCY), c->groups * c->rows / HEAD, HEAD, HEAD, 0};
        const kern_linear_args product = {.x = place(memory, c->x),
                                          .weight = param(f, memory, c->weight),
                                          .bias = c->biased ? param(f, memory, BIAS) : (kern_ptr){.ref = 0},
                                          .residual = place(memory, c->add),
                                          .y = place(memory, c->y),
                                          .cols = COLS,
                                          .rows = c->rows,
                                          .row0 = c->row0,
                                          .groups = c->groups};
        const kern_op op = c->turns ? KERN_OP_ROPE : KERN_OP_LINEAR;
        const void *args = c->turns ? (const void *)&turn : (const void *)&product;
        const kern_status status =
            memory ? kern_launch(f->test.stream, op, f->test.rows, args) : kern_plan_add(plan, op, args);
        ck_assert_msg(status == KERN_OK, "call %d: %s", i, kern_status_text(status));
    }
}

// What the arena holds after the plan, in memory[0], and after the launches, in memory[1].
static void run_both(fixture *f, const program *p) {
    kern_plan *plan = NULL;
    const kern_memory memory = {.param = f->param, .scratch = f->memory[0]};
    for (int i = 0; i < 2; i++)
        memcpy(f->memory[i], f->x, ARENA * sizeof *f->x);
    ck_assert_int_eq(kern_plan_create(f->test.device, &plan), KERN_OK);
    emit(f, p, NULL, plan);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    ck_assert_int_eq(kern_plan_run(plan, f->test.stream, f->test.rows, &memory), KERN_OK);
    kern_plan_free(plan);
    emit(f, p, f->memory[1], NULL);
}

enum { GENERATED, PROMPTS, BOTH, MIXES };

static void make_rows(kernel_test *test, int mix) {
    kernel_test_clear_rows(test);
    for (int i = 0; mix != PROMPTS && i < (mix == BOTH ? 3 : 5); i++)
        kernel_test_row(test, KERN_ROW_GENERATED, -1, 1, 40 + 3 * i);
    if (mix != GENERATED) {
        kernel_test_row(test, KERN_ROW_PROMPT, -1, 7, 0);
        kernel_test_row(test, KERN_ROW_PROMPT, -1, TOKENS - 10, 5);
    }
    ck_assert_int_le(test->rows->n_tokens, TOKENS);
    kernel_test_prepare(test);
}

// -------------------------------------------------------------------------------------------------- known sequences

enum { MOST_RUNS = 16 };
static struct seen {
    kern_status (*run)(kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *const *a, int parts);
    int parts[MOST_RUNS], runs; // of more than one part
} seen;

static kern_status see(kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *const *a, int parts) {
    if (parts > 1)
        seen.parts[seen.runs++] = parts;
    return seen.run(cpu, rows, a, parts);
}

enum { X, A, B, C, D, E, F, G, H }; // places that do not overlap
enum { PLACE = TOKENS * ROWS };
_Static_assert((H + 1) * PLACE <= ARENA, "the arena has the places");

#define PRODUCT(from, to) \
    { .weight = BF16 * TWO, .x = (from)*PLACE, .y = (to)*PLACE, .add = NOWHERE, .rows = COLS, .groups = 1 }
#define INTO(from, to, residual) \
    { .weight = BF16 * TWO, .x = (from)*PLACE, .y = (to)*PLACE, .add = (residual)*PLACE, .rows = COLS, .groups = 1 }
#define OTHER(kind, from, to) \
    { .weight = (kind)*TWO, .x = (from)*PLACE, .y = (to)*PLACE, .add = NOWHERE, .rows = COLS, .groups = 1 }
#define TURN(at) \
    { .turns = true, .y = (at)*PLACE, .rows = COLS, .groups = 1 }

static const struct known {
    const char *what;
    program program;
    int parts[4]; // of its runs of several products; 0: no more
} knowns[] = {
    {"query, key, value with rotations among them",
     {{PRODUCT(X, A), TURN(A), PRODUCT(X, B), TURN(B), PRODUCT(X, C)}, 5},
     {3}},
    {"a rotation behind the last product", {{PRODUCT(X, A), PRODUCT(X, B), TURN(A), TURN(B)}, 4}, {2}},
    {"six, and the seventh and eighth",
     {{PRODUCT(X, A), PRODUCT(X, B), PRODUCT(X, C), PRODUCT(X, D), PRODUCT(X, E), PRODUCT(X, F), PRODUCT(X, G),
       PRODUCT(X, H)},
      8},
     {6, 2}},
    {"the second reads what the first writes", {{PRODUCT(X, A), PRODUCT(A, B)}, 2}, {0}},
    {"both write one place", {{PRODUCT(X, A), PRODUCT(X, A)}, 2}, {0}},
    {"the second adds what the first writes", {{PRODUCT(X, A), INTO(X, B, A)}, 2}, {0}},
    {"the second writes what the first adds", {{INTO(X, A, B), PRODUCT(X, B)}, 2}, {0}},
    {"both add the same", {{INTO(X, A, C), INTO(X, B, C)}, 2}, {2}},
    {"each adds in place", {{INTO(X, A, A), INTO(X, B, B)}, 2}, {2}},
    {"the second writes what is rotated", {{PRODUCT(X, A), TURN(B), PRODUCT(X, B)}, 3}, {0}},
    {"the second adds what is rotated", {{PRODUCT(X, A), TURN(C), INTO(X, B, C)}, 3}, {0}},
    {"the input is rotated", {{PRODUCT(X, A), TURN(X), PRODUCT(X, B)}, 3}, {0}},
    {"another input between", {{PRODUCT(X, A), PRODUCT(H, B), PRODUCT(X, C)}, 3}, {0}},
    {"other kinds of weights", {{OTHER(F32, X, A), OTHER(BF16, X, B), OTHER(Q8, X, C)}, 3}, {0}},
    {"with a minimum and without",
     {{OTHER(Q4, X, A), OTHER(Q4, X, B), OTHER(Q4_MINIMUM, X, C), OTHER(Q4_MINIMUM, X, D)}, 4},
     {2, 2}},
};

START_TEST(known_sequences) {
    fixture f;
    if (!open_fixture(&f, _i))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kern_cpu *cpu = (kern_cpu *)f.test.device;
    kern_cpu_table table = *cpu->table;
    const kern_cpu_table *own = cpu->table;
    make_rows(&f.test, GENERATED);
    for (size_t i = 0; i < sizeof knowns / sizeof knowns[0]; i++) {
        const struct known *k = &knowns[i];
        seen = (struct seen){.run = own->linear_parts};
        table.linear_parts = see;
        cpu->table = &table;
        run_both(&f, &k->program);
        cpu->table = own;
        for (int n = 0; n < 4; n++)
            ck_assert_msg(seen.parts[n] == k->parts[n], "%s: run %d of several has %d, not %d", k->what, n,
                          seen.parts[n], k->parts[n]);
        kernel_test_assert_same(f.memory[0], f.memory[1], ARENA);
    }
    close_fixture(&f);
}
END_TEST

// ------------------------------------------------------------------------------------------------- drawn sequences

static int draw(kernel_test *test, int below) {
    return (int)(kernel_test_uniform(test) * below);
}

static bool apart(int a, int a_floats, int b, int b_floats) {
    return a + a_floats <= b || b + b_floats <= a;
}

// A product by itself does not write what it reads, other than its residual in place.
static bool is_sound(const program_call *c) {
    const int y = TOKENS * c->groups * c->rows, x = TOKENS * c->groups * COLS;
    if (c->turns)
        return true;
    return apart(c->y, y, c->x, x) && (c->add == NOWHERE || c->add == c->y || apart(c->y, y, c->add, y));
}

static program_call draw_call(kernel_test *test, const int *pool, int pools, const program_call *last) {
    program_call c;
    do {
        const bool like = last && draw(test, 5) > 0; // mostly what may join
        const int add = draw(test, 5);
        c = (program_call){.turns = draw(test, 4) == 0,
                           .weight = like ? last->weight / TWO * TWO + draw(test, TWO) : draw(test, WEIGHTS),
                           .x = like ? last->x : pool[draw(test, pools)],
                           .y = pool[draw(test, pools)],
                           .biased = draw(test, 3) == 0,
                           .rows = HEAD * (1 + draw(test, ROWS / HEAD)),
                           .groups = like ? last->groups : 1 + draw(test, GROUPS)};
        c.row0 = draw(test, ROWS - c.rows + 1);
        c.add = add == 0 ? c.y : add == 1 ? pool[draw(test, pools)] : NOWHERE;
    } while (!is_sound(&c));
    return c;
}

START_TEST(drawn_sequences) {
    enum { PROGRAMS = 200, POOL = 9 };
    fixture f;
    if (!open_fixture(&f, _i))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int n = 0; n < PROGRAMS; n++) {
        int pool[POOL];
        program p = {.calls = 2 + draw(&f.test, MOST_CALLS - 1)};
        const program_call *last = NULL;
        for (int i = 0; i < POOL; i++)
            pool[i] = 16 * draw(&f.test, (ARENA - STRETCH) / 16);
        for (int i = 0; i < p.calls; i++) {
            p.call[i] = draw_call(&f.test, pool, POOL, last);
            last = p.call[i].turns ? last : &p.call[i];
        }
        make_rows(&f.test, n % MIXES);
        run_both(&f, &p);
        ck_assert_msg(memcmp(f.memory[0], f.memory[1], ARENA * sizeof(float)) == 0, "program %d is another", n);
        bool finite = true;
        for (int i = 0; i < ARENA; i++)
            finite = finite && isfinite(f.memory[1][i]);
        ck_assert_msg(finite, "program %d tells nothing", n);
    }
    close_fixture(&f);
}
END_TEST

static Suite *calls_suite(void) {
    Suite *suite = suite_create("calls");
    TCase *tests = tcase_create("calls");
    tcase_add_loop_test(tests, known_sequences, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, drawn_sequences, 0, KERNEL_TEST_ISAS);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(calls_suite)
