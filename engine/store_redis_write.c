// SPDX-License-Identifier: Apache-2.0
// PUT, APPEND and EXPIRE in Redis: ask for the head, send a large payload ahead, then write in one script.
//
// The plan of a write (store_record.c) starts from a head. Where this process has seen the record's head before, it
// tries with that one and saves a round trip; only a head that was asked for on behalf of the request may be the reason
// for refusing it. A large payload goes ahead in pieces under a generation that no head names yet: they end by
// themselves if nothing comes of it. Every attempt has a generation of its own, so that a piece that arrives late from
// a broken connection touches nothing that stands.
#include <stdio.h>
#include <string.h>

#include "engine/store_redis.h"

// A server that syncs every step does so once a call: neither many small ones nor one that keeps others waiting.
enum { PIECES_A_CALL = 8, CALLS = 2, STAGED_MS = 120000 };

static bool is_put(const eng_redis_task *task) {
    return task->job->request.op == ENG_STORE_PUT;
}

static uint32_t pieces_of(const eng_redis_task *task) {
    return is_put(task) ? eng_store_pieces(task->job->request.buffer->length) : 0;
}

static void conflict(eng_redis *r, eng_redis_task *task) {
    eng_redis_remember(r, task->name, NULL);
    eng_redis_finish(r, task,
                     eng_fail(&task->job->reply.error, ENG_CONFLICT, "another has taken the session's lease since"));
}

static void full(eng_redis *r, eng_redis_task *task) {
    eng_error *error = &task->job->reply.error;
    eng_redis_finish(r, task,
                     task->force ? eng_fail(error, ENG_FULL, "the store: Redis has reached maxmemory")
                                 : eng_fail(error, ENG_FULL, "the store: its budget of %llu bytes is used up",
                                            (unsigned long long)r->budget));
}

// ---------------------------------------------------------------------------------------------------------------- plan

// From task->old to a head and the next step. A refusal or a repetition that rests on a head from before asks first.
static void plan(eng_redis *r, eng_redis_task *task) {
    eng_store_job *job = task->job;
    bool same;
    eng_error error = {0};
    eng_status status = eng_store_plan(job, task->has_old ? &task->old : NULL, eng_redis_time(&r->link),
                                       &task->new_head, &same, &error);
    if ((status != ENG_OK || same) && !task->fresh) {
        task->step = ENG_REDIS_STEP_PEEK;
    } else if (status != ENG_OK) {
        job->reply.error = error;
        eng_redis_finish(r, task, status);
    } else if (same) {
        task->step = ENG_REDIS_STEP_LAST;
    } else {
        task->step = task->large && !task->staged ? ENG_REDIS_STEP_STAGE : ENG_REDIS_STEP_WRITE;
    }
}

void eng_redis_begin_write(eng_redis *r, eng_redis_task *task) {
    const eng_redis_hint *hint = eng_redis_hint_of(r, task->name);
    task->large = pieces_of(task) > ENG_REDIS_SMALL_PIECES;
    if (is_put(task))
        task->job->generation = ++r->generation;
    task->step = ENG_REDIS_STEP_PEEK;
    task->has_old = hint != NULL;
    if (!hint || task->large || task->force || task->attempts)
        return;
    task->old = hint->head;
    plan(r, task);
}

// ------------------------------------------------------------------------------------------------------------- sending

static void add_epoch(const eng_redis_task *task, eng_redis_args *args) {
    const eng_store_request *request = &task->job->request;
    if (request->op != ENG_STORE_EXPIRE && request->meta.kind == ENG_STORE_SESSION)
        eng_redis_add_number(args, (int64_t)request->epoch);
    else
        eng_redis_add_text(args, "");
}

// How full the store may get by snapshots, and by this write.
static void add_limits(const eng_redis *r, const eng_redis_task *task, eng_redis_args *args) {
    unsigned percent = task->job->request.op == ENG_STORE_PUT ? 95 : 98;
    if (task->job->request.meta.kind == ENG_STORE_PREFIX && is_put(task))
        percent = 90;
    eng_redis_add_number(args, (int64_t)(r->budget / 100 * 90));
    eng_redis_add_number(args, (int64_t)(r->budget / 100 * percent));
}

static void send_peek(eng_redis *r, eng_redis_task *task) {
    eng_redis_args args = {0};
    eng_redis_add_text(&args, task->name);
    eng_redis_add_until(r, task, &args);
    add_epoch(task, &args);
    eng_redis_add_number(&args, task->large ? (int64_t)task->job->request.buffer->length : 0);
    add_limits(r, task, &args);
    eng_redis_add_text(&args, task->force ? "1" : "0");
    eng_redis_call(&r->link, ENG_REDIS_PEEK, task->name, &args, eng_redis_due_of(r, task, 0));
}

static void add_generation(uint64_t generation, char text[17], eng_redis_args *args) {
    snprintf(text, 17, "%016llx", (unsigned long long)generation);
    eng_redis_add_text(args, text);
}

static void add_piece(const eng_redis_task *task, uint32_t piece, eng_redis_args *args) {
    const eng_store_buffer *buffer = task->job->request.buffer;
    eng_redis_add(args, buffer->bytes + (size_t)piece * ENG_STORE_PIECE_BYTES,
                  eng_store_piece_bytes(buffer->length, piece));
}

static void staged_key(const eng_redis_task *task, char key[160]) {
    snprintf(key, 160, ENG_REDIS_PREFIX "%s:%016llx", task->name, (unsigned long long)task->job->generation);
}

static uint32_t behind_call(const eng_redis_task *task, uint32_t first) {
    uint32_t count = pieces_of(task);
    return first + PIECES_A_CALL < count ? first + PIECES_A_CALL : count;
}

// Pieces and the time after which they end by themselves, in one transaction. No script: these are many bytes.
static void send_pieces(eng_redis *r, eng_redis_task *task, uint32_t first) {
    char key[160];
    eng_redis_args begin = {0}, set = {0}, expire = {0}, commit = {0};
    eng_redis_due due = eng_redis_due_of(r, task, first), queued = due, ignored = due;
    queued.step = ENG_REDIS_STEP_QUEUE;
    ignored.task = -1;
    staged_key(task, key);
    eng_redis_add_text(&begin, "MULTI");
    eng_redis_add_text(&set, "HSET");
    eng_redis_add_text(&set, key);
    for (uint32_t i = first; i < behind_call(task, first); i++) {
        eng_redis_add_number(&set, i);
        add_piece(task, i, &set);
    }
    eng_redis_add_text(&expire, "PEXPIRE");
    eng_redis_add_text(&expire, key);
    eng_redis_add_number(&expire, STAGED_MS + r->link.time_limit_ms);
    eng_redis_add_text(&commit, "EXEC");
    task->pending += 2;
    eng_redis_command(&r->link, &begin, ignored);
    eng_redis_command(&r->link, &set, queued);
    eng_redis_command(&r->link, &expire, ignored);
    eng_redis_command(&r->link, &commit, due);
}

// Not while a write is under way that may yet name it.
void eng_redis_drop_staged(eng_redis *r, eng_redis_task *task) {
    eng_redis_args args = {0};
    char key[160];
    bool naming = task->step == ENG_REDIS_STEP_WRITE && task->pending > 0;
    if (!is_put(task) || !task->large || task->sent == 0 || naming || r->link.state != ENG_REDIS_READY)
        return;
    staged_key(task, key);
    eng_redis_add_text(&args, "DEL");
    eng_redis_add_text(&args, key);
    eng_redis_command(&r->link, &args,
                      (eng_redis_due){.task = -1, .step = ENG_REDIS_STEP_IGNORE, .script = ENG_REDIS_SCRIPTS});
}

static eng_status add_operation(eng_redis_task *task, char generation[17], eng_redis_args *args) {
    eng_store_job *job = task->job;
    if (job->request.op == ENG_STORE_APPEND) {
        const void *bytes;
        size_t count;
        eng_status status =
            eng_store_frame_entry(job, task->has_old ? task->old.position : 0, &bytes, &count, &job->reply.error);
        if (status != ENG_OK)
            return status;
        eng_redis_add(args, bytes, count);
        eng_redis_add_number(args, ENG_STORE_JOURNAL_BYTES);
    } else if (is_put(task)) {
        bool later = task->has_old && task->old.position > job->request.meta.position &&
                     job->request.meta.kind == ENG_STORE_SESSION;
        add_generation(job->generation, generation, args);
        eng_redis_add_number(args, (int64_t)job->request.buffer->length);
        eng_redis_add_number(args, pieces_of(task));
        if (later)
            eng_redis_add_number(args, job->request.meta.position);
        else
            eng_redis_add_text(args, "");
        for (uint32_t i = 0; !task->large && i < pieces_of(task); i++)
            add_piece(task, i, args);
    }
    return ENG_OK;
}

static void send_write(eng_redis *r, eng_redis_task *task) {
    static const char *const names[] = {
        [ENG_STORE_PUT] = "put", [ENG_STORE_APPEND] = "append", [ENG_STORE_EXPIRE] = "expire"};
    eng_redis_args args = {0};
    char owner[2 * ENG_STORE_OWNER_BYTES + 1], generation[17];
    eng_redis_hex(task->new_head.owner, ENG_STORE_OWNER_BYTES, owner);
    eng_redis_add_text(&args, task->name);
    eng_redis_add_until(r, task, &args);
    add_epoch(task, &args);
    eng_redis_add_text(&args, names[task->job->request.op]);
    eng_redis_add(&args, task->old.digest, task->has_old ? sizeof task->old.digest : 0);
    eng_redis_add(&args, &task->new_head, sizeof task->new_head);
    eng_redis_add_text(&args, owner);
    eng_redis_add_number(&args, task->new_head.expires_ms);
    add_limits(r, task, &args);
    eng_status status = add_operation(task, generation, &args);
    if (status != ENG_OK) {
        eng_redis_finish(r, task, status);
        return;
    }
    eng_redis_due due = eng_redis_due_of(r, task, 0);
    if (r->grouping)
        due.step = ENG_REDIS_STEP_MEMBER;
    task->pending++;
    eng_redis_call(&r->link, ENG_REDIS_WRITE, task->name, &args, due);
}

static void send_last(eng_redis *r, eng_redis_task *task) {
    eng_redis_args args = {0};
    char key[128];
    snprintf(key, sizeof key, ENG_REDIS_PREFIX "%s:journal", task->name);
    eng_redis_add_text(&args, "LINDEX");
    eng_redis_add_text(&args, key);
    eng_redis_add_text(&args, "-1");
    task->pending++;
    eng_redis_command(&r->link, &args, eng_redis_due_of(r, task, 0));
}

void eng_redis_send_write(eng_redis *r, eng_redis_task *task) {
    uint64_t serial = task->serial;
    if (task->step == ENG_REDIS_STEP_STAGE) {
        while (task->serial == serial && task->pending < 2 * CALLS && task->sent < pieces_of(task) &&
               eng_redis_link_has_room(&r->link)) {
            uint32_t first = task->sent;
            task->sent = behind_call(task, first);
            send_pieces(r, task, first);
        }
        return;
    }
    if (task->pending)
        return;
    if (is_put(task) && r->touches && !r->grouping) // before something may have to go
        eng_redis_send_touches(r);
    if (r->link.state != ENG_REDIS_READY)
        return;
    if (task->step == ENG_REDIS_STEP_PEEK) {
        task->pending++;
        send_peek(r, task);
    } else if (task->step == ENG_REDIS_STEP_WRITE) {
        send_write(r, task);
    } else {
        send_last(r, task);
    }
}

// ------------------------------------------------------------------------------------------------------------- answers

// The record stands behind where this process has seen it: a server that did not sync came back, or its time was over.
// An entry must not follow upon what it does not continue.
static bool has_gone_back(eng_redis *r, const eng_redis_task *task) {
    const eng_redis_hint *hint = eng_redis_hint_of(r, task->name);
    return hint && (!task->has_old || task->old.position < hint->head.position);
}

static void take_peek(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    const redisReply *word = eng_redis_element(reply, 0), *head = eng_redis_element(reply, 2);
    if (eng_redis_is_text(word, "fenced")) {
        conflict(r, task);
        return;
    }
    bool fits = eng_redis_is_text(word, "ok");
    if (!head || (!fits && !eng_redis_is_text(word, "full"))) {
        eng_redis_strange(r, task);
        return;
    }
    eng_store_tell_dropped(r->store, (uint64_t)eng_redis_number(eng_redis_element(reply, 1)), 0);
    if (!fits) {
        full(r, task);
        return;
    }
    task->force = false;
    task->fresh = true;
    task->has_old = head->type != REDIS_REPLY_NIL;
    eng_status status = ENG_OK;
    if (task->has_old)
        status = eng_store_read_head(head->str, head->type == REDIS_REPLY_STRING ? head->len : 0,
                                     &task->job->request.meta, &task->old, &task->job->reply.error);
    if (status == ENG_OK && task->job->request.op == ENG_STORE_APPEND && has_gone_back(r, task))
        status = eng_fail(&task->job->reply.error, ENG_IO, "the store: Redis has lost what it had acknowledged");
    if (task->has_old && status == ENG_OK)
        eng_redis_remember(r, task->name, &task->old);
    else
        eng_redis_remember(r, task->name, NULL);
    if (status == ENG_OK)
        plan(r, task);
    else
        eng_redis_finish(r, task, status);
}

static void take_stage(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, const redisReply *reply) {
    const redisReply *expires = eng_redis_element(reply, 1);
    if (!expires || expires->type != REDIS_REPLY_INTEGER || expires->integer != 1) {
        eng_redis_strange(r, task);
        return;
    }
    eng_redis_progress(r, task, behind_call(task, due->index) - due->index);
    if (task->done < pieces_of(task))
        return;
    task->staged = true;
    task->step = ENG_REDIS_STEP_WRITE;
}

static void written(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    eng_store_tell_dropped(r->store, (uint64_t)eng_redis_number(eng_redis_element(reply, 1)), 0);
    eng_redis_remember(r, task->name, &task->new_head);
    eng_store_head_meta(&task->new_head, &task->job->reply.meta);
    eng_redis_finish(r, task, ENG_OK);
}

static void take_outcome(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    const redisReply *word = eng_redis_element(reply, 0);
    if (eng_redis_is_text(word, "ok")) {
        written(r, task, reply);
    } else if (eng_redis_is_text(word, "fenced")) {
        conflict(r, task);
    } else if (eng_redis_is_text(word, "stale")) { // what is staged may stay
        task->fresh = false;
        task->step = ENG_REDIS_STEP_PEEK;
        if (++task->stale > 64)
            eng_redis_finish(r, task,
                             eng_fail(&task->job->reply.error, ENG_IO, "the store: others write the record at once"));
    } else if (eng_redis_is_text(word, "missing")) {
        eng_redis_again(r, task, 0, "what was sent ahead of a state is gone");
    } else if (eng_redis_is_text(word, "journal")) {
        eng_redis_finish(r, task,
                         eng_fail(&task->job->reply.error, ENG_FULL,
                                  "the session's journal is full; its state has to be put first"));
    } else if (eng_redis_is_text(word, "full")) {
        eng_store_tell_dropped(r->store, (uint64_t)eng_redis_number(eng_redis_element(reply, 1)), 0);
        full(r, task);
    } else {
        eng_redis_strange(r, task);
    }
}

static void take_last(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    bool same = reply->type == REDIS_REPLY_STRING && eng_store_same_entry(task->job, reply->str, reply->len);
    eng_store_head_meta(&task->old, &task->job->reply.meta);
    eng_redis_finish(r, task, eng_store_already(task->job, same, &task->job->reply.error));
}

void eng_redis_take_write(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, const redisReply *reply) {
    if (eng_redis_is_late(r, task, reply))
        return;
    switch (due->step) {
    case ENG_REDIS_STEP_QUEUE:
        break;
    case ENG_REDIS_STEP_PEEK:
        take_peek(r, task, reply);
        break;
    case ENG_REDIS_STEP_STAGE:
        take_stage(r, task, due, reply);
        break;
    case ENG_REDIS_STEP_WRITE:
        take_outcome(r, task, reply);
        break;
    default:
        take_last(r, task, reply);
    }
}
