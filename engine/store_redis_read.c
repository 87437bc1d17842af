// SPDX-License-Identifier: Apache-2.0
// GET, FIND, DELETE, LIST, leases and usage in Redis.
//
// A GET takes head, journal and a small payload in one step of the server. The pieces of a large one are fetched
// behind, by the generation that the head names; if another writer has replaced it meanwhile they are gone, and the GET
// starts again: it never mixes two states. Pieces that are gone though the head still names them are damage.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store_redis.h"

enum { WINDOW = 8 };

// ------------------------------------------------------------------------------------------------------------- sending

static void call(eng_redis *r, eng_redis_task *task, eng_redis_script script, const eng_redis_args *args) {
    task->pending++;
    eng_redis_call(&r->link, script, task->name[0] ? task->name : "records", args, eng_redis_due_of(r, task, 0));
}

static void send_get(eng_redis *r, eng_redis_task *task) {
    const eng_store_buffer *buffer = task->job->request.buffer;
    eng_redis_args args = {0};
    eng_redis_add_text(&args, task->name);
    if (buffer)
        eng_redis_add_number(&args, (int64_t)buffer->capacity);
    else
        eng_redis_add_text(&args, "");
    eng_redis_add_number(&args, ENG_REDIS_SMALL_PIECES);
    call(r, task, ENG_REDIS_READ, &args);
}

static void send_piece(eng_redis *r, eng_redis_task *task, uint32_t piece) {
    eng_redis_args args = {0};
    char key[160];
    snprintf(key, sizeof key, ENG_REDIS_PREFIX "%s:%016llx", task->name, (unsigned long long)task->old.generation);
    eng_redis_add_text(&args, "HGET");
    eng_redis_add_text(&args, key);
    eng_redis_add_number(&args, piece);
    task->pending++;
    eng_redis_command(&r->link, &args, eng_redis_due_of(r, task, piece));
}

static void send_of_owner(eng_redis *r, eng_redis_task *task, eng_redis_script script) {
    const eng_store_request *request = &task->job->request;
    eng_redis_args args = {0};
    char owner[2 * ENG_STORE_OWNER_BYTES + 1], holder[2 * ENG_STORE_HOLDER_BYTES + 1];
    eng_redis_hex(request->meta.owner, ENG_STORE_OWNER_BYTES, owner);
    eng_redis_hex(request->holder, ENG_STORE_HOLDER_BYTES, holder);
    eng_redis_add_text(&args, task->name);
    eng_redis_add_until(r, task, &args);
    if (script == ENG_REDIS_DELETE && request->epoch == 0)
        eng_redis_add_text(&args, "");
    else
        eng_redis_add_number(&args, (int64_t)request->epoch);
    eng_redis_add_text(&args, owner);
    eng_redis_add_text(&args, holder);
    eng_redis_add_number(&args, request->ttl_ms);
    eng_redis_add_number(&args, ENG_STORE_WISH_MS);
    call(r, task, script, &args);
}

static void send_wishes(eng_redis *r, eng_redis_task *task) {
    eng_redis_args args = {0};
    char holder[2 * ENG_STORE_HOLDER_BYTES + 1];
    eng_redis_hex(task->job->request.holder, ENG_STORE_HOLDER_BYTES, holder);
    eng_redis_add_until(r, task, &args);
    eng_redis_add_text(&args, holder);
    eng_redis_add_number(&args, ENG_STORE_PAGE);
    call(r, task, ENG_REDIS_WISHES, &args);
}

static void send_find(eng_redis *r, eng_redis_task *task) {
    const eng_store_request *request = &task->job->request;
    const size_t ids = request->entry_bytes / ENG_STORE_ID_BYTES, width = ENG_REDIS_NAME - 1;
    char *all = malloc(ids * width + 1);
    eng_redis_args args = {0};
    if (!all) {
        eng_redis_finish(r, task, eng_fail(&task->job->reply.error, ENG_NO_MEMORY, "out of memory for ids"));
        return;
    }
    for (size_t i = 0; i < ids; i++) {
        all[i * width] = request->meta.kind == ENG_STORE_PREFIX ? 'p' : 's';
        eng_redis_hex((const unsigned char *)request->entry + i * ENG_STORE_ID_BYTES, ENG_STORE_ID_BYTES,
                      all + i * width + 1);
    }
    eng_redis_add(&args, all, ids * width);
    call(r, task, ENG_REDIS_FIND, &args);
    free(all);
}

static void send_list(eng_redis *r, eng_redis_task *task) {
    const eng_store_meta *meta = &task->job->request.meta;
    eng_redis_args args = {0};
    char owner[2 * ENG_STORE_OWNER_BYTES + 1], after[2 * ENG_STORE_ID_BYTES + 1];
    eng_redis_hex(meta->owner, ENG_STORE_OWNER_BYTES, owner);
    eng_redis_hex(task->after, ENG_STORE_ID_BYTES, after);
    eng_redis_add_text(&args, meta->kind == ENG_STORE_PREFIX ? "p" : "s");
    eng_redis_add_text(&args, owner);
    eng_redis_add_text(&args, after);
    eng_redis_add_number(&args, ENG_STORE_PAGE);
    call(r, task, ENG_REDIS_LIST, &args);
}

static uint32_t pieces_of(const eng_redis_task *task) {
    return eng_store_pieces(task->old.payload_bytes);
}

void eng_redis_send_read(eng_redis *r, eng_redis_task *task) {
    uint64_t serial = task->serial;
    if (task->step == ENG_REDIS_STEP_PIECE) {
        while (task->serial == serial && task->pending < WINDOW && task->sent < pieces_of(task) &&
               eng_redis_link_has_room(&r->link))
            send_piece(r, task, task->sent++);
        return;
    }
    if (task->pending)
        return;
    switch (task->step) {
    case ENG_REDIS_STEP_READ:
        send_get(r, task);
        break;
    case ENG_REDIS_STEP_FIND:
        send_find(r, task);
        break;
    case ENG_REDIS_STEP_DELETE:
        send_of_owner(r, task, ENG_REDIS_DELETE);
        break;
    case ENG_REDIS_STEP_LEASE:
        send_of_owner(r, task, ENG_REDIS_LEASE);
        break;
    case ENG_REDIS_STEP_RELEASE:
        send_of_owner(r, task, ENG_REDIS_RELEASE);
        break;
    case ENG_REDIS_STEP_LIST:
        send_list(r, task);
        break;
    case ENG_REDIS_STEP_WISHES:
        send_wishes(r, task);
        break;
    default:
        call(r, task, ENG_REDIS_USAGE, &(eng_redis_args){0});
    }
}

void eng_redis_begin(eng_redis *r, eng_redis_task *task) {
    static const eng_redis_step first[] = {
        [ENG_STORE_GET] = ENG_REDIS_STEP_READ,      [ENG_STORE_FIND] = ENG_REDIS_STEP_FIND,
        [ENG_STORE_DELETE] = ENG_REDIS_STEP_DELETE, [ENG_STORE_LIST] = ENG_REDIS_STEP_LIST,
        [ENG_STORE_LEASE] = ENG_REDIS_STEP_LEASE,   [ENG_STORE_RELEASE] = ENG_REDIS_STEP_RELEASE,
        [ENG_STORE_USAGE] = ENG_REDIS_STEP_USAGE,   [ENG_STORE_WISHES] = ENG_REDIS_STEP_WISHES};
    eng_store_op op = task->job->request.op;
    memcpy(task->after, task->job->request.meta.id, sizeof task->after);
    if (op == ENG_STORE_PUT || op == ENG_STORE_APPEND || op == ENG_STORE_EXPIRE)
        eng_redis_begin_write(r, task);
    else
        task->step = first[op];
}

// ----------------------------------------------------------------------------------------------------------------- GET

static void got(eng_redis *r, eng_redis_task *task) {
    eng_store_job *job = task->job;
    const redisReply *entries = eng_redis_element(task->kept, 3);
    int64_t at = -1;
    job->request.buffer->length = (size_t)task->old.payload_bytes;
    eng_status status = eng_store_check_payload(job, &task->old, &job->reply.error);
    for (size_t i = 0; status == ENG_OK && i < entries->elements; i++) {
        const redisReply *entry = entries->element[i];
        status = eng_store_take_entry(job, &task->old, &at, entry->str,
                                      entry->type == REDIS_REPLY_STRING ? entry->len : 0, &job->reply.error);
    }
    if (status == ENG_OK)
        status = eng_store_check_chain(&task->old, at, &job->reply.error);
    if (status == ENG_OK && task->name[0] == 'p')
        eng_redis_touch(r, task->name);
    if (status == ENG_OK)
        eng_redis_remember(r, task->name, &task->old);
    eng_redis_finish(r, task, status);
}

static bool copy_piece(eng_redis_task *task, uint32_t piece, const redisReply *reply) {
    if (!reply || reply->type != REDIS_REPLY_STRING ||
        reply->len != eng_store_piece_bytes(task->old.payload_bytes, piece))
        return false;
    memcpy(task->job->request.buffer->bytes + (size_t)piece * ENG_STORE_PIECE_BYTES, reply->str, reply->len);
    return true;
}

static void lacks_piece(eng_redis *r, eng_redis_task *task) {
    bool twice = task->lacking && task->lacking_generation == task->old.generation;
    task->lacking = true;
    task->lacking_generation = task->old.generation;
    if (twice)
        eng_redis_finish(
            r, task,
            eng_fail(&task->job->reply.error, ENG_FORMAT, "a piece of a stored state is missing or cut short"));
    else
        eng_redis_again(r, task, 0, "the state is replaced again and again while it is read");
}

static eng_status read_head(eng_redis *r, eng_redis_task *task, const redisReply *head) {
    eng_store_job *job = task->job;
    eng_error *error = &job->reply.error;
    if (head->type == REDIS_REPLY_NIL)
        return eng_store_not_found(error);
    eng_status status = eng_store_read_head(head->str, head->type == REDIS_REPLY_STRING ? head->len : 0,
                                            &job->request.meta, &task->old, error);
    if (status == ENG_OK)
        status = eng_store_may_read(job, &task->old, eng_redis_time(&r->link), error);
    if (status == ENG_OK)
        eng_store_head_meta(&task->old, &job->reply.meta);
    return status;
}

// True: the reply is kept until the pieces of the payload have come.
static bool take_get(eng_redis *r, eng_redis_task *task, redisReply *reply) {
    eng_store_job *job = task->job;
    const redisReply *head = eng_redis_element(reply, 0), *pieces = eng_redis_element(reply, 2),
                     *entries = eng_redis_element(reply, 3);
    eng_status status = head ? read_head(r, task, head) : ENG_OK;
    if (!head) {
        eng_redis_strange(r, task);
    } else if (status != ENG_OK || !job->request.buffer) {
        eng_redis_finish(r, task, status);
    } else if (!pieces || pieces->type != REDIS_REPLY_ARRAY || !entries || entries->type != REDIS_REPLY_ARRAY) {
        eng_redis_strange(r, task);
    } else if ((status = eng_store_room(job, &task->old, (uint64_t)eng_redis_number(eng_redis_element(reply, 1)),
                                        &job->reply.error)) != ENG_OK) {
        eng_redis_finish(r, task, status);
    } else {
        uint32_t count = pieces_of(task), copied = 0;
        task->kept = reply;
        if (count > ENG_REDIS_SMALL_PIECES) {
            task->step = ENG_REDIS_STEP_PIECE;
            return true;
        }
        while (copied < count && copy_piece(task, copied, eng_redis_element(pieces, copied)))
            copied++;
        if (copied == count)
            got(r, task);
        else
            lacks_piece(r, task);
        return true;
    }
    return false;
}

static void take_piece(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, const redisReply *reply) {
    if (!copy_piece(task, due->index, reply)) {
        lacks_piece(r, task);
        return;
    }
    eng_redis_progress(r, task, 1);
    if (task->done == pieces_of(task))
        got(r, task);
}

// ---------------------------------------------------------------------------------------------------------- the others

static void take_find(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    eng_store_job *job = task->job;
    const size_t ids = job->request.entry_bytes / ENG_STORE_ID_BYTES;
    if (reply->type != REDIS_REPLY_INTEGER || reply->integer < -1 || reply->integer >= (long long)ids) {
        eng_redis_strange(r, task);
    } else if (reply->integer < 0) {
        eng_redis_finish(r, task, eng_store_not_found(&job->reply.error));
    } else {
        memcpy(job->reply.meta.id, (const char *)job->request.entry + (size_t)reply->integer * ENG_STORE_ID_BYTES,
               sizeof job->reply.meta.id);
        eng_redis_finish(r, task, ENG_OK);
    }
}

static void take_delete(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    const redisReply *word = eng_redis_element(reply, 0);
    eng_error *error = &task->job->reply.error;
    eng_redis_remember(r, task->name, NULL);
    if (eng_redis_is_text(word, "ok") || (task->sent_before && eng_redis_is_text(word, "absent")))
        eng_redis_finish(r, task, ENG_OK);
    else if (eng_redis_is_text(word, "absent"))
        eng_redis_finish(r, task, eng_store_not_found(error));
    else if (eng_redis_is_text(word, "fenced"))
        eng_redis_finish(r, task, eng_fail(error, ENG_CONFLICT, "another has taken the session's lease since"));
    else
        eng_redis_strange(r, task);
}

static void take_lease(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    const redisReply *word = eng_redis_element(reply, 0), *value = eng_redis_element(reply, 1);
    eng_store_reply *out = &task->job->reply;
    if (eng_redis_is_text(word, "ok")) {
        if (value && task->job->request.epoch == 0) // whatever happened before it was taken is no fault
            eng_redis_remember(r, task->name, NULL);
        out->epoch = (uint64_t)eng_redis_number(value);
        out->lease_ms = value ? task->job->request.ttl_ms : 0; // releasing tells none
        eng_redis_finish(r, task, ENG_OK);
    } else if (eng_redis_is_text(word, "busy")) {
        out->lease_ms = eng_redis_number(value);
        eng_redis_finish(r, task, eng_fail(&out->error, ENG_BUSY, "another holds the session's lease"));
    } else if (eng_redis_is_text(word, "taken")) {
        eng_redis_finish(r, task, eng_fail(&out->error, ENG_CONFLICT, "another has taken the session's lease since"));
    } else if (eng_redis_is_text(word, "absent")) {
        eng_redis_finish(r, task, eng_store_not_found(&out->error));
    } else {
        eng_redis_strange(r, task);
    }
}

static bool read_hex(const char *text, unsigned char *out, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        unsigned byte = 0;
        if (sscanf(text + 2 * i, "%2x", &byte) != 1)
            return false;
        out[i] = (unsigned char)byte;
    }
    return true;
}

static eng_status list_one(eng_redis *r, eng_redis_task *task, const redisReply *id, const redisReply *head) {
    eng_store_meta of = {.kind = task->job->request.meta.kind};
    eng_store_head read;
    if (id->type != REDIS_REPLY_STRING || id->len != 2 * sizeof of.id || !read_hex(id->str, of.id, sizeof of.id))
        return eng_fail(&task->job->reply.error, ENG_FORMAT, "the store's list of records is damaged");
    memcpy(task->after, of.id, sizeof of.id);
    if (head->type != REDIS_REPLY_STRING || head->len == 0) // its time was over
        return ENG_OK;
    if (eng_store_read_head(head->str, head->len, &of, &read, NULL) != ENG_OK)
        task->job->reply.damaged++;
    else if (!eng_store_over(&read, eng_redis_time(&r->link)))
        return eng_store_list_add(task->job, &read, &task->job->reply.error);
    return ENG_OK;
}

static void take_list(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    eng_store_reply *out = &task->job->reply;
    const redisReply *more = eng_redis_element(reply, 0);
    eng_status status = ENG_OK;
    size_t i = 1;
    if (!more || more->type != REDIS_REPLY_INTEGER) {
        eng_redis_strange(r, task);
        return;
    }
    for (; status == ENG_OK && i + 1 < reply->elements && out->count < ENG_STORE_PAGE; i += 2)
        status = list_one(r, task, reply->element[i], reply->element[i + 1]);
    out->more = more->integer != 0 || i + 1 < reply->elements;
    if (status == ENG_OK && out->more && out->count < ENG_STORE_PAGE)
        return; // the next part is asked for, behind task->after
    eng_redis_finish(r, task, status);
}

// What is no wish is left out: nothing depends on it.
static void take_wishes(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    enum { TEXT = ENG_REDIS_NAME - 1 + 2 * ENG_STORE_OWNER_BYTES };
    const redisReply *wishes = eng_redis_element(reply, 1);
    eng_store_reply *out = &task->job->reply;
    eng_status status = ENG_OK;
    if (!wishes || wishes->type != REDIS_REPLY_ARRAY) {
        eng_redis_strange(r, task);
        return;
    }
    for (size_t i = 0; i < wishes->elements && out->count < ENG_STORE_PAGE && status == ENG_OK; i++) {
        const redisReply *wish = wishes->element[i];
        unsigned char id[ENG_STORE_ID_BYTES], owner[ENG_STORE_OWNER_BYTES];
        if (wish->type == REDIS_REPLY_STRING && wish->len == TEXT && read_hex(wish->str + 1, id, sizeof id) &&
            read_hex(wish->str + ENG_REDIS_NAME - 1, owner, sizeof owner))
            status = eng_store_list_wish(out, id, owner, &out->error);
    }
    eng_redis_finish(r, task, status);
}

static void take_usage(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 3) {
        eng_redis_strange(r, task);
        return;
    }
    int64_t bytes = eng_redis_number(reply->element[0]);
    task->job->reply.usage = (eng_store_usage){.bytes = bytes > 0 ? (uint64_t)bytes : 0,
                                               .budget = r->budget,
                                               .sessions = (uint64_t)eng_redis_number(reply->element[1]),
                                               .prefixes = (uint64_t)eng_redis_number(reply->element[2])};
    eng_redis_finish(r, task, ENG_OK);
}

bool eng_redis_take_read(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, redisReply *reply) {
    if (due->step != ENG_REDIS_STEP_PIECE && eng_redis_is_late(r, task, reply))
        return false;
    switch (due->step) {
    case ENG_REDIS_STEP_READ:
        return take_get(r, task, reply);
    case ENG_REDIS_STEP_PIECE:
        take_piece(r, task, due, reply);
        return false;
    case ENG_REDIS_STEP_FIND:
        take_find(r, task, reply);
        return false;
    case ENG_REDIS_STEP_DELETE:
        take_delete(r, task, reply);
        return false;
    case ENG_REDIS_STEP_LIST:
        take_list(r, task, reply);
        return false;
    case ENG_REDIS_STEP_LEASE:
    case ENG_REDIS_STEP_RELEASE:
        take_lease(r, task, reply);
        return false;
    case ENG_REDIS_STEP_WISHES:
        take_wishes(r, task, reply);
        return false;
    default:
        take_usage(r, task, reply);
        return false;
    }
}
