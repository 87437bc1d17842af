// SPDX-License-Identifier: Apache-2.0
// Where the time of steps goes; see profile.h.
//
// Lines are found by phase and name: operations of one kind and shape share a line. Products are told apart by their
// shape, since that decides what limits them.
#include "trainer/profile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/progress.h"

typedef struct line {
    trn_phase phase;
    char name[64];
    int64_t calls;
    double seconds;
    kern_cost cost;
    double floor; // filled by the printer
    bool by_bytes;
} line;

struct trn_profile {
    kern_device *device;
    kern_event **mark; // (marks)
    size_t marks;
    line *line;
    int32_t lines, capacity;
    double began, cursor, own; // of the step at hand: its start, the end of the last piece, the profile's own work
    double wall;
    int64_t steps;
    bool failed; // for lack of memory
};

static const char *const phase_names[TRN_PHASES] = {"teacher",   "forward", "loss", "backward",
                                                    "optimizer", "data",    "rest"};

eng_status trn_profile_create(kern_device *device, trn_profile **out, eng_error *error) {
    *out = calloc(1, sizeof **out);
    if (!*out)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a profile");
    (*out)->device = device;
    return ENG_OK;
}

void trn_profile_free(trn_profile *profile) {
    if (!profile)
        return;
    for (size_t i = 0; i < profile->marks; i++)
        kern_event_free(profile->mark[i]);
    free(profile->mark);
    free(profile->line);
    free(profile);
}

// -------------------------------------------------------------------------------------------------------------- pieces

static line *find_line(trn_profile *profile, trn_phase phase, const char *name) {
    for (int32_t i = 0; i < profile->lines; i++)
        if (profile->line[i].phase == phase && strcmp(profile->line[i].name, name) == 0)
            return &profile->line[i];
    if (profile->lines == profile->capacity) {
        const int32_t capacity = 2 * profile->capacity + 32;
        line *grown = realloc(profile->line, sizeof *grown * (size_t)capacity);
        if (!grown) {
            profile->failed = true;
            return NULL;
        }
        profile->line = grown;
        profile->capacity = capacity;
    }
    line *made = &profile->line[profile->lines++];
    *made = (line){.phase = phase};
    snprintf(made->name, sizeof made->name, "%s", name);
    return made;
}

static void add(trn_profile *profile, trn_phase phase, const char *name, double seconds, kern_cost cost) {
    line *found = find_line(profile, phase, name);
    if (!found)
        return;
    found->calls++;
    found->seconds += seconds;
    found->cost.operations += cost.operations;
    found->cost.bytes += cost.bytes;
}

void trn_profile_begin(trn_profile *profile) {
    if (!profile)
        return;
    profile->own = 0;
    profile->began = profile->cursor = trn_seconds();
}

void trn_profile_end(trn_profile *profile) {
    if (!profile)
        return;
    profile->wall += trn_seconds() - profile->began - profile->own;
    profile->steps++;
}

void trn_profile_piece(trn_profile *profile, kern_stream *stream, trn_phase phase, const char *name, kern_cost cost) {
    if (!profile)
        return;
    // What a device that is lost could not do is told by whoever launches next.
    if (stream && kern_synchronize(stream) != KERN_OK)
        return;
    const double now = trn_seconds();
    add(profile, phase, name, now - profile->cursor, cost);
    profile->cursor = now;
}

void trn_profile_parameters(trn_profile *profile, kern_stream *stream, const char *name, int64_t parameters,
                            double words, double operations) {
    const kern_cost cost = {.operations = operations * (double)parameters,
                            .bytes = sizeof(float) * words * (double)parameters};
    trn_profile_piece(profile, stream, TRN_PHASE_OPTIMIZER, name, cost);
}

// --------------------------------------------------------------------------------------------------------------- plans

static void product_name(char *name, size_t size, const char *what, int32_t from, int32_t to) {
    snprintf(name, size, "%s %d to %d", what, from, to);
}

static void name_of(const kern_plan *plan, size_t index, char *name, size_t size) {
    const kern_op op = kern_plan_op(plan, index);
    const void *args = kern_plan_args(plan, index);
    kern_linear_args linear;
    kern_linear_backward_input_args input;
    kern_linear_backward_weight_args weight;
    switch (op) {
    case KERN_OP_LINEAR:
        memcpy(&linear, args, sizeof linear);
        product_name(name, size, "linear", linear.cols, linear.rows);
        break;
    case KERN_OP_LINEAR_BACKWARD_INPUT:
        memcpy(&input, args, sizeof input);
        product_name(name, size, "linear input", input.cols, input.rows);
        break;
    case KERN_OP_LINEAR_BACKWARD_WEIGHT:
        memcpy(&weight, args, sizeof weight);
        product_name(name, size, "linear weight", weight.cols, weight.rows);
        break;
    default:
        snprintf(name, size, "%s", kern_op_name(op));
    }
}

static bool is_loss(kern_op op) {
    return op == KERN_OP_HEAD_LOSS || op == KERN_OP_EXIT_LOSS || op == KERN_OP_EXIT_PROBABILITY;
}

static eng_status make_marks(trn_profile *profile, size_t count, eng_error *error) {
    if (count <= profile->marks)
        return ENG_OK;
    kern_event **grown = realloc(profile->mark, sizeof *grown * count);
    if (!grown)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for %zu events", count);
    profile->mark = grown;
    while (profile->marks < count) {
        kern_status made = kern_event_create_timed(profile->device, &profile->mark[profile->marks]);
        if (made != KERN_OK)
            return eng_fail_kernel(error, made, "making events");
        profile->marks++;
    }
    return ENG_OK;
}

static eng_status mean_steps(trn_runner *runner, kern_ptr reference, double *steps, eng_error *error) {
    const int32_t tokens = runner->rows->n_tokens;
    eng_compute sum = {0};
    *steps = 0;
    if (!reference.ref)
        return ENG_OK;
    kern_solve_sum *solves = malloc(sizeof *solves * (size_t)tokens);
    if (!solves)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the figures of %d tokens", tokens);
    eng_status status = trn_runner_read(runner, reference, solves, sizeof *solves * (size_t)tokens, error);
    if (status == ENG_OK)
        eng_add_solves(solves, tokens, &sum);
    free(solves);
    *steps = sum.solves > 0 ? (double)sum.steps / (double)sum.solves : 0;
    return status;
}

static eng_status add_operations(trn_profile *profile, trn_runner *runner, eng_error *error) {
    const kern_plan *plan = runner->plan->plan;
    const bool teaches = runner->plan->options.kind == ENG_PLAN_TEACH;
    double forward = 0, backward = 0;
    bool lost = false; // behind the loss
    eng_status status = mean_steps(runner, runner->plan->solves, &forward, error);
    if (status == ENG_OK)
        status = mean_steps(runner, runner->plan->backward_solves, &backward, error);
    for (size_t i = 0; status == ENG_OK && i < kern_plan_length(plan); i++) {
        const kern_op op = kern_plan_op(plan, i);
        const bool loss = is_loss(op);
        double seconds = 0;
        char name[64];
        status = eng_fail_kernel(error, kern_event_elapsed(profile->mark[i], profile->mark[i + 1], &seconds),
                                 "reading the times of operations");
        name_of(plan, i, name, sizeof name);
        lost = lost || loss;
        add(profile,
            teaches ? TRN_PHASE_TEACHER
            : loss  ? TRN_PHASE_LOSS
            : lost  ? TRN_PHASE_BACKWARD
                    : TRN_PHASE_FORWARD,
            name, seconds,
            kern_plan_cost(plan, i, runner->rows, &runner->memory, op == KERN_OP_MESA_BACKWARD ? backward : forward));
    }
    return status;
}

eng_status trn_profile_run(trn_profile *profile, trn_runner *runner, eng_error *error) {
    const kern_plan *plan = runner->plan->plan;
    double start = trn_seconds();
    eng_status status = make_marks(profile, kern_plan_length(plan) + 1, error);
    profile->own += trn_seconds() - start;
    if (status != ENG_OK)
        return status;
    kern_status made = kern_plan_run_marked(plan, runner->stream, runner->rows, &runner->memory, profile->mark);
    if (made == KERN_OK)
        made = kern_synchronize(runner->stream);
    if (made != KERN_OK)
        return eng_fail_kernel(error, made, "running the model");
    start = trn_seconds();
    status = add_operations(profile, runner, error);
    profile->cursor = trn_seconds();
    profile->own += profile->cursor - start;
    return status;
}

// --------------------------------------------------------------------------------------------------------------- table

static int longest_first(const void *a, const void *b) {
    const double x = ((const line *)a)->seconds, y = ((const line *)b)->seconds;
    return (x < y) - (x > y);
}

// A copy of the lines, with their floors, the rest and room for one more; NULL: no memory.
static line *finish(const trn_profile *profile, const trn_limits *limits, int32_t *count) {
    line *lines = malloc(sizeof *lines * (size_t)(profile->lines + 1));
    if (!lines)
        return NULL;
    line rest = {.phase = TRN_PHASE_REST, .name = "not attributed", .calls = profile->steps, .seconds = profile->wall};
    for (int32_t i = 0; i < profile->lines; i++) {
        lines[i] = profile->line[i];
        const double bytes = lines[i].cost.bytes / limits->memory;
        const double operations = lines[i].cost.operations / limits->matrix;
        lines[i].by_bytes = bytes > operations;
        lines[i].floor = fmax(bytes, operations);
        rest.seconds -= lines[i].seconds;
    }
    qsort(lines, (size_t)profile->lines, sizeof *lines, longest_first);
    lines[profile->lines] = rest;
    *count = profile->lines + 1;
    return lines;
}

static void print_line(const trn_profile *profile, const line *at, FILE *out) {
    const double steps = (double)profile->steps;
    fprintf(out, "| %s | %s | %.4g | %.3f | %.1f %% |", at->name, phase_names[at->phase], (double)at->calls / steps,
            1e3 * at->seconds / steps, 100 * at->seconds / profile->wall);
    if (at->floor > 0)
        fprintf(out, " %.3f | %.2f | %s |\n", 1e3 * at->floor / steps, at->floor / at->seconds,
                at->by_bytes ? "bytes" : "operations");
    else
        fprintf(out, " | | |\n");
}

static void print_phases(const trn_profile *profile, const line *lines, int32_t count, FILE *out) {
    fprintf(out, "\n| phase | ms | share | floor ms |\n|---|---|---|---|\n");
    for (int phase = 0; phase < TRN_PHASES; phase++) {
        double seconds = 0, floor = 0;
        for (int32_t i = 0; i < count; i++)
            if (lines[i].phase == (trn_phase)phase) {
                seconds += lines[i].seconds;
                floor += lines[i].floor;
            }
        if (seconds > 0)
            fprintf(out, "| %s | %.3f | %.1f %% | %.3f |\n", phase_names[phase], 1e3 * seconds / (double)profile->steps,
                    100 * seconds / profile->wall, 1e3 * floor / (double)profile->steps);
    }
    fprintf(out, "| all | %.3f | 100 %% | |\n", 1e3 * profile->wall / (double)profile->steps);
}

void trn_profile_print(const trn_profile *profile, const trn_limits *limits, const char *unit, FILE *out) {
    int32_t count = 0;
    line *lines = profile->steps > 0 && !profile->failed ? finish(profile, limits, &count) : NULL;
    if (!lines) {
        fprintf(out, "no %s was profiled\n", unit);
        return;
    }
    const double steps = (double)profile->steps;
    fprintf(out,
            "%lld %s%s of %.3f ms each, %s; floor: the larger of bytes at %.1f GB/s and operations at %.0f GFLOP/s; "
            "more than its floor allows is what a cache held\n\n",
            (long long)profile->steps, unit, profile->steps > 1 ? "s" : "", 1e3 * profile->wall / steps,
            kern_device_describe(profile->device)->description, 1e-9 * limits->memory, 1e-9 * limits->matrix);
    fprintf(out, "| operation | phase | calls | ms | share | floor ms | floor / time | limit |\n"
                 "|---|---|---|---|---|---|---|---|\n");
    for (int32_t i = 0; i < count; i++)
        print_line(profile, &lines[i], out);
    print_phases(profile, lines, count, out);
    free(lines);
}

char *trn_profile_text(const trn_profile *profile, const trn_limits *limits, const char *unit) {
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    if (!out)
        return NULL;
    trn_profile_print(profile, limits, unit, out);
    if (fclose(out) == 0)
        return text;
    free(text);
    return NULL;
}
