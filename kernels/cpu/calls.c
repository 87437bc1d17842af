// SPDX-License-Identifier: Apache-2.0
// A plan's calls on the CPU: in order, except that neighbouring products of one input run as one.
//
// Such products round their input once and are one phase of the team. Rotations may stand between them: they change
// outputs of the products before, so they wait until all are done. A product joins when nothing that it reads or writes
// is written by one that it now runs beside, or by a rotation that it now overtakes. A step of generated tokens alone
// is one session of the team.
#include "kernels/cpu/cpu.h"

typedef struct step {
    kern_stream *stream;
    kern_cpu *cpu;
    const kern_rows *rows;
    const kern_calls *calls;
    kern_status status;
} step;

typedef struct range {
    const char *begin, *end;
} range;

static range floats_at(const step *s, const float *p, int64_t width) {
    return (range){(const char *)p, p ? (const char *)(p + s->rows->n_tokens * width) : (const char *)p};
}

static bool overlap(range a, range b) {
    return a.begin < b.end && b.begin < a.end;
}

static int64_t groups_of(const kern_linear_args *a) {
    return a->groups > 0 ? a->groups : 1;
}

static range output_of(const step *s, const kern_linear_args *a) {
    return floats_at(s, a->y.f, groups_of(a) * a->rows);
}

static range residual_of(const step *s, const kern_linear_args *a) {
    return floats_at(s, a->residual.f, groups_of(a) * a->rows);
}

static range input_of(const step *s, const kern_linear_args *a) {
    return floats_at(s, a->x.f, groups_of(a) * a->cols);
}

static bool same_input(const kern_linear_args *a, const kern_linear_args *b) {
    return a->x.f == b->x.f && a->cols == b->cols && groups_of(a) == groups_of(b) &&
           a->weight.w->dtype == b->weight.w->dtype && a->weight.w->minimum == b->weight.w->minimum;
}

// Products of one input, and the rotations among them.
typedef struct group {
    const kern_linear_args *part[KERN_LINEAR_PARTS];
    const kern_call *waiting[KERN_LINEAR_PARTS];
    range turned[KERN_LINEAR_PARTS]; // what those change
    int parts, waits;
} group;

static bool joins(const step *s, const group *g, const kern_linear_args *a) {
    const range y = output_of(s, a), residual = residual_of(s, a);
    if (g->parts == KERN_LINEAR_PARTS || !same_input(g->part[0], a) || overlap(y, input_of(s, a)))
        return false;
    for (int i = 0; i < g->parts; i++) {
        const range other = output_of(s, g->part[i]);
        if (overlap(other, y) || overlap(other, residual) || overlap(other, input_of(s, a)) ||
            overlap(y, residual_of(s, g->part[i])))
            return false;
    }
    for (int i = 0; i < g->waits; i++)
        if (overlap(g->turned[i], y) || overlap(g->turned[i], residual))
            return false;
    return true;
}

static bool may_wait(const step *s, group *g, const kern_call *call) {
    const kern_rope_args *a = call->args;
    const range x = floats_at(s, a->x.f, (int64_t)a->heads * a->head_width);
    if (g->waits == KERN_LINEAR_PARTS || overlap(x, input_of(s, g->part[0])))
        return false;
    g->waiting[g->waits] = call;
    g->turned[g->waits++] = x;
    return true;
}

// The products that begin with call i; how many calls they are with the rotations among them.
static size_t gather(const step *s, size_t i, group *g) {
    const kern_call *call = s->calls->call + i;
    *g = (group){.part = {call[0].args}, .parts = 1};
    size_t taken = 1;
    int waits = 0; // rotations before the last product
    for (size_t n = 1; i + n < s->calls->count; n++) {
        if (call[n].op == KERN_OP_LINEAR && joins(s, g, call[n].args)) {
            g->part[g->parts++] = call[n].args;
            taken = n + 1;
            waits = g->waits;
        } else if (call[n].op != KERN_OP_ROPE || !may_wait(s, g, &call[n])) {
            break;
        }
    }
    g->waits = waits;
    return taken;
}

static kern_status run_group(const step *s, const group *g) {
    kern_status status = s->cpu->table->linear_parts(s->cpu, s->rows, g->part, g->parts);
    for (int i = 0; i < g->waits && !status; i++)
        status = kern_launch(s->stream, g->waiting[i]->op, s->rows, g->waiting[i]->args);
    return status;
}

static void run_marked(step *s) {
    s->status = kern_event_record(s->stream, s->calls->mark[0]);
    for (size_t i = 0; i < s->calls->count && !s->status; i++) {
        s->status = kern_launch(s->stream, s->calls->call[i].op, s->rows, s->calls->call[i].args);
        if (!s->status)
            s->status = kern_event_record(s->stream, s->calls->mark[i + 1]);
    }
}

static void run_calls(void *context) {
    step *s = context;
    if (s->calls->mark) {
        run_marked(s);
        return;
    }
    for (size_t i = 0, taken; i < s->calls->count && !s->status; i += taken) {
        const kern_call *call = s->calls->call + i;
        group g = {.parts = 0};
        taken = call->op == KERN_OP_LINEAR && s->rows ? gather(s, i, &g) : 1;
        s->status = g.parts > 1 ? run_group(s, &g) : kern_launch(s->stream, call->op, s->rows, call->args);
    }
}

kern_status kern_cpu_calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls) {
    kern_cpu *cpu = (kern_cpu *)stream->device;
    kern_cpu_limit_threads(cpu);
    if (rows && rows->followed && (rows = kern_rows_now(rows))->n_tokens == 0)
        return KERN_OK;
    step s = {stream, cpu, rows, calls, KERN_OK};
    if (rows && rows->n_generated > 0 && rows->n_generated == rows->n_tokens)
        kern_team_session(cpu->team, run_calls, &s);
    else
        run_calls(&s); // prompts' products make teams of their own
    return s.status;
}
