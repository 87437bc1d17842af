// SPDX-License-Identifier: Apache-2.0
// Plans: a list of operations whose operands are references, and the generic runner that resolves and launches them.
//
// Each entry is the argument struct as it was added, in one growing block. The operands are its leading members
// (kern_op_operands), so one loop resolves any operation. Building allocates and checks; running does neither, except
// for the one check that costs nothing: a reference that must be there and resolves to nothing is refused. State and
// pages may be absent (training without slots), but not while a row has a slot. A plan is immutable once sealed.
//
// For a backend that runs plans as a whole the operands are resolved once for a memory and kept, with what the backend
// makes of them, until the plan meets another memory.
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

typedef struct plan_entry {
    kern_op op;
    size_t offset; // of the arguments in the block
} plan_entry;

typedef struct plan_resolved {
    bool valid;
    kern_memory memory; // that the calls belong to
    kern_calls calls;
    kern_call *call;
    char *block; // the plan's block with device pointers as operands
} plan_resolved;

struct kern_plan {
    kern_device *device;
    bool sealed, uses_state;
    bool lacks_state; // an operation in it does
    plan_entry *entry;
    size_t entries, entry_capacity;
    char *block;
    size_t bytes, capacity;
    plan_resolved *resolved; // with a backend that runs plans as a whole
};

// The largest argument struct and its alignment.
typedef union plan_args {
#define PLAN_ARGS_MEMBER(code, name, args, first) args name;
    KERN_OPS(PLAN_ARGS_MEMBER)
#undef PLAN_ARGS_MEMBER
} plan_args;

kern_status kern_plan_create(kern_device *device, kern_plan **out) {
    *out = calloc(1, sizeof **out);
    if (!*out)
        return KERN_NO_MEMORY;
    (*out)->device = device;
    return KERN_OK;
}

static void forget(plan_resolved *resolved) {
    if (resolved->valid && resolved->calls.device->backend->calls_forget)
        resolved->calls.device->backend->calls_forget(&resolved->calls);
    resolved->valid = false;
    resolved->calls.made = NULL;
}

static void resolved_free(plan_resolved *resolved) {
    if (!resolved)
        return;
    forget(resolved);
    free(resolved->call);
    free(resolved->block);
    free(resolved);
}

void kern_plan_free(kern_plan *plan) {
    if (!plan)
        return;
    resolved_free(plan->resolved);
    free(plan->entry);
    free(plan->block);
    free(plan);
}

size_t kern_plan_length(const kern_plan *plan) {
    return plan->entries;
}

// ---------------------------------------------------------------------------------------------------------- building

static kern_class ref_class(kern_ptr operand) {
    return (kern_class)(operand.ref >> 56);
}

static uint64_t ref_value(kern_ptr operand) {
    return operand.ref & (((uint64_t)1 << 56) - 1);
}

static bool ref_is_valid(kern_ptr operand) {
    switch (ref_class(operand)) {
    case KERN_CLASS_NULL:
        return operand.ref == 0;
    case KERN_CLASS_PARAM:
    case KERN_CLASS_GRAD:
    case KERN_CLASS_ROWS:
        return true;
    case KERN_CLASS_STATE:
    case KERN_CLASS_PAGES:
    case KERN_CLASS_SAVED:
    case KERN_CLASS_SCRATCH:
        return ref_value(operand) % 64 == 0;
    }
    return false;
}

// Makes room for `more` bytes or entries by doubling; the old memory stays valid when it fails.
static bool grow(void **memory, size_t used, size_t *capacity, size_t more, size_t unit) {
    if (used + more <= *capacity)
        return true;
    size_t wanted = *capacity ? 2 * *capacity : 64;
    while (wanted < used + more)
        wanted *= 2;
    void *larger = realloc(*memory, wanted * unit);
    if (!larger)
        return false;
    *memory = larger;
    *capacity = wanted;
    return true;
}

kern_status kern_plan_add(kern_plan *plan, kern_op op, const void *args) {
    size_t size = kern_op_args_size(op), operands = kern_op_operands(op);
    if (plan->sealed || size == 0)
        return KERN_INVALID;
    plan_args copy;
    memcpy(&copy, args, size);
    const kern_ptr *operand = (const kern_ptr *)&copy;
    bool uses_state = false;
    for (size_t i = 0; i < operands; i++) {
        if (!ref_is_valid(operand[i]))
            return KERN_INVALID;
        uses_state |= ref_class(operand[i]) == KERN_CLASS_STATE;
    }
    kern_status status = kern_reserve(plan->device, op, args);
    if (status)
        return status;
    void *entry = plan->entry, *block = plan->block;
    bool room = grow(&entry, plan->entries, &plan->entry_capacity, 1, sizeof *plan->entry);
    plan->entry = entry;
    if (!room)
        return KERN_NO_MEMORY;
    room = grow(&block, plan->bytes, &plan->capacity, size, 1);
    plan->block = block;
    if (!room)
        return KERN_NO_MEMORY;
    memcpy(plan->block + plan->bytes, args, size);
    plan->entry[plan->entries++] = (plan_entry){op, plan->bytes};
    plan->bytes += size;
    plan->uses_state |= uses_state;
    plan->lacks_state |= kern_op_lacks_state(op, args);
    return KERN_OK;
}

static plan_resolved *resolved_create(const kern_plan *plan) {
    plan_resolved *resolved = calloc(1, sizeof *resolved);
    if (!resolved)
        return NULL;
    resolved->call = calloc(plan->entries + 1, sizeof *resolved->call);
    resolved->block = malloc(plan->bytes + 1);
    if (!resolved->call || !resolved->block) {
        resolved_free(resolved);
        return NULL;
    }
    for (size_t i = 0; i < plan->entries; i++)
        resolved->call[i] = (kern_call){plan->entry[i].op, resolved->block + plan->entry[i].offset};
    resolved->calls = (kern_calls){.device = plan->device, .call = resolved->call, .count = plan->entries};
    return resolved;
}

kern_status kern_plan_seal(kern_plan *plan) {
    if (plan->sealed)
        return KERN_INVALID;
    if (plan->device->backend->calls_run && !(plan->resolved = resolved_create(plan)))
        return KERN_NO_MEMORY;
    plan->sealed = true;
    return KERN_OK;
}

bool kern_plan_is_captured(const kern_plan *plan) {
    return plan->resolved && plan->device->backend->calls_forget;
}

// ----------------------------------------------------------------------------------------------------------- running

static void *at(void *base, uint64_t offset) {
    return base ? (char *)base + offset : NULL;
}

static void *resolve(kern_ptr operand, const kern_memory *memory) {
    uint64_t value = ref_value(operand);
    switch (ref_class(operand)) {
    case KERN_CLASS_NULL:
        return NULL;
    case KERN_CLASS_PARAM:
        return memory->param ? memory->param[value] : NULL;
    case KERN_CLASS_GRAD:
        return memory->grad ? memory->grad[value] : NULL;
    case KERN_CLASS_STATE:
        return at(memory->state, value);
    case KERN_CLASS_PAGES:
        return at(memory->pages, value);
    case KERN_CLASS_SAVED:
        return at(memory->saved, value);
    case KERN_CLASS_SCRATCH:
        return at(memory->scratch, value);
    case KERN_CLASS_ROWS:
        return memory->next;
    }
    return NULL;
}

static bool may_be_absent(kern_ptr operand) {
    kern_class class_ = ref_class(operand);
    return class_ == KERN_CLASS_NULL || class_ == KERN_CLASS_STATE || class_ == KERN_CLASS_PAGES;
}

static kern_status resolve_entry(plan_entry entry, const char *stored, const kern_memory *memory, void *args) {
    memcpy(args, stored, kern_op_args_size(entry.op));
    kern_ptr *operand = args;
    size_t operands = kern_op_operands(entry.op);
    for (size_t i = 0; i < operands; i++) {
        void *pointer = resolve(operand[i], memory);
        if (!pointer && !may_be_absent(operand[i]))
            return KERN_INVALID;
        operand[i].p = pointer;
    }
    return KERN_OK;
}

static bool same_memory(const kern_memory *a, const kern_memory *b) {
    return a->param == b->param && a->grad == b->grad && a->state == b->state && a->pages == b->pages &&
           a->saved == b->saved && a->scratch == b->scratch && a->next == b->next;
}

static kern_status resolve_all(const kern_plan *plan, const kern_memory *memory) {
    plan_resolved *resolved = plan->resolved;
    if (resolved->valid && same_memory(&resolved->memory, memory))
        return KERN_OK;
    forget(resolved);
    for (size_t i = 0; i < plan->entries; i++) {
        size_t offset = plan->entry[i].offset;
        kern_status status = resolve_entry(plan->entry[i], plan->block + offset, memory, resolved->block + offset);
        if (status)
            return status;
    }
    resolved->memory = *memory;
    resolved->valid = true;
    return KERN_OK;
}

static kern_status run_resolved(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                                const kern_memory *memory, size_t first, size_t end) {
    kern_calls *calls = &plan->resolved->calls;
    kern_status status = resolve_all(plan, memory);
    if (status || (first == 0 && end == plan->entries))
        return status ? status : plan->device->backend->calls_run(stream, rows, calls);
    kern_calls part = *calls;
    part.call += first;
    part.count = end - first;
    status = plan->device->backend->calls_run(stream, rows, &part);
    calls->made = part.made;
    return status;
}

static kern_status check_run(const kern_plan *plan, const kern_stream *stream, const kern_rows *rows,
                             const kern_memory *memory) {
    if (!plan->sealed || stream->device != plan->device)
        return KERN_INVALID;
    const bool needs = plan->lacks_state || (plan->uses_state && !memory->state);
    return needs && kern_rows_have_slots(rows) ? KERN_INVALID : KERN_OK;
}

static kern_status run_part(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                            const kern_memory *memory, size_t first, size_t end) {
    kern_status status = check_run(plan, stream, rows, memory);
    if (status)
        return status;
    if (plan->resolved)
        return run_resolved(plan, stream, rows, memory, first, end);
    for (size_t i = first; i < end && !status; i++) {
        plan_args args;
        status = resolve_entry(plan->entry[i], plan->block + plan->entry[i].offset, memory, &args);
        if (!status)
            status = kern_launch(stream, plan->entry[i].op, rows, &args);
    }
    return status;
}

kern_status kern_plan_run(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                          const kern_memory *memory) {
    return run_part(plan, stream, rows, memory, 0, plan->entries);
}

kern_status kern_plan_run_part(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                               const kern_memory *memory, size_t first, size_t end) {
    // What a backend makes of a batch of generated tokens alone belongs to the whole plan.
    if (first > end || end > plan->entries || rows->n_generated == rows->n_tokens)
        return KERN_INVALID;
    return run_part(plan, stream, rows, memory, first, end);
}

kern_status kern_plan_run_marked(const kern_plan *plan, kern_stream *stream, const kern_rows *rows,
                                 const kern_memory *memory, kern_event *const *mark) {
    kern_status status = check_run(plan, stream, rows, memory);
    if (!status && !plan->resolved)
        status = KERN_UNSUPPORTED;
    if (!status)
        status = resolve_all(plan, memory);
    if (status)
        return status;
    kern_calls calls = plan->resolved->calls;
    calls.mark = mark;
    status = plan->device->backend->calls_run(stream, rows, &calls);
    plan->resolved->calls.made = calls.made;
    return status;
}

kern_op kern_plan_op(const kern_plan *plan, size_t index) {
    return plan->entry[index].op;
}

const void *kern_plan_args(const kern_plan *plan, size_t index) {
    return plan->block + plan->entry[index].offset;
}

// A part of a matrix that several products share needs its part of the bytes alone.
static double part_of_weight(const kern_plan *plan, const kern_linear_args *args) {
    int32_t rows = args->row0 + args->rows;
    for (size_t i = 0; i < plan->entries; i++) {
        kern_linear_args other;
        if (plan->entry[i].op != KERN_OP_LINEAR)
            continue;
        memcpy(&other, kern_plan_args(plan, i), sizeof other);
        if (other.weight.ref == args->weight.ref && other.row0 + other.rows > rows)
            rows = other.row0 + other.rows;
    }
    return (double)args->rows / rows;
}

kern_cost kern_plan_cost(const kern_plan *plan, size_t index, const kern_rows *rows, const kern_memory *memory,
                         double solver_steps) {
    plan_args args;
    const kern_op op = plan->entry[index].op;
    double part = 1;
    if (resolve_entry(plan->entry[index], plan->block + plan->entry[index].offset, memory, &args) != KERN_OK)
        return (kern_cost){0};
    if (op == KERN_OP_LINEAR) {
        kern_linear_args stored;
        memcpy(&stored, kern_plan_args(plan, index), sizeof stored);
        part = part_of_weight(plan, &stored);
    }
    return kern_op_cost(op, rows, &args, part, solver_steps);
}

size_t kern_plan_last_use(const kern_plan *plan, kern_ptr operand) {
    for (size_t i = plan->entries; i > 0; i--) {
        plan_args args;
        plan_entry entry = plan->entry[i - 1];
        memcpy(&args, plan->block + entry.offset, kern_op_args_size(entry.op));
        const kern_ptr *own = (const kern_ptr *)&args;
        for (size_t k = 0; k < kern_op_operands(entry.op); k++)
            if (own[k].ref == operand.ref)
                return i;
    }
    return 0;
}
