// SPDX-License-Identifier: Apache-2.0
// The connection to a Redis server: made, greeted, watched, dropped and made again.
//
// One connection a store, never blocking. Commands go out one behind the other and answers come back in that order, so
// a ring of what is due says whose an answer is. A server that does not answer within the time limit, or answers what
// is no Redis protocol, loses the connection; another is tried after a pause that doubles up to two seconds. What was
// under way is then the tasks' matter. Only a host's *name* may take longer than the limits: the system's resolver
// looks it up.
//
// A greeting asks who the server is: version, role, and settings under which it would lose what it has acknowledged,
// which are told once in the log. The password goes into AUTH alone; what AUTH is answered is told by its first word.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "engine/store_redis.h"

enum { CONNECT_MS = 3000, FIRST_PAUSE_MS = 20, LONGEST_PAUSE_MS = 2000, MOST_OUT = 2 << 20, MOST_IN = 64 << 20 };

typedef enum greeting { AUTH = ENG_REDIS_STEPS, SELECT, INFO, FSYNC, LOAD, TIME } greeting;

enum { NOT_KEPT = 1, NOT_SYNCED = 2, EVICTS = 4 };

// ------------------------------------------------------------------------------------------------------------ commands

void eng_redis_add(eng_redis_args *args, const void *bytes, size_t count) {
    args->at[args->count] = count ? bytes : "";
    args->bytes[args->count++] = count;
}

void eng_redis_add_text(eng_redis_args *args, const char *text) {
    eng_redis_add(args, text, strlen(text));
}

void eng_redis_add_number(eng_redis_args *args, int64_t number) {
    char *text = args->number[args->numbers++];
    snprintf(text, sizeof args->number[0], "%" PRId64, number);
    eng_redis_add_text(args, text);
}

void eng_redis_command(eng_redis_link *link, const eng_redis_args *args, eng_redis_due due) {
    eng_redis_out out = {0};
    if (link->state == ENG_REDIS_DOWN)
        return;
    long long length = redisFormatCommandArgv(&out.bytes, args->count, (const char **)args->at, args->bytes);
    if (length < 0) {
        eng_redis_link_fail(link, "out of memory for a command");
        return;
    }
    if (link->count == ENG_REDIS_DUE) {
        redisFreeCommand(out.bytes);
        eng_redis_link_fail(link, "more answers are due than may be");
        return;
    }
    uint32_t at = (link->first + link->count++) % ENG_REDIS_DUE;
    out.length = (size_t)length;
    due.sent_at = eng_store_clock();
    link->due[at] = due;
    link->out[at] = out;
    link->unwritten += out.length;
}

void eng_redis_call(eng_redis_link *link, eng_redis_script script, const char *key, const eng_redis_args *args,
                    eng_redis_due due) {
    eng_redis_args all = {0};
    char name[128];
    due.script = script;
    due.whole = !link->loaded[script];
    snprintf(name, sizeof name, ENG_REDIS_PREFIX "%s", key);
    eng_redis_add_text(&all, due.whole ? "EVAL" : "EVALSHA");
    eng_redis_add_text(&all, due.whole ? link->text[script] : link->sha[script]);
    eng_redis_add_text(&all, "1");
    eng_redis_add_text(&all, name);
    for (int i = 0; i < args->count; i++)
        eng_redis_add(&all, args->at[i], args->bytes[i]);
    eng_redis_command(link, &all, due);
}

bool eng_redis_link_is_open(const eng_redis_link *link) {
    return link->state == ENG_REDIS_READY && link->count < ENG_REDIS_DUE / 2 && link->unwritten < 8 * MOST_OUT;
}

bool eng_redis_link_has_room(const eng_redis_link *link) {
    return eng_redis_link_is_open(link) && link->unwritten < MOST_OUT;
}

int64_t eng_redis_time(const eng_redis_link *link) {
    return eng_store_clock() + link->clock;
}

bool eng_redis_says(const redisReply *reply, const char *word) {
    return reply->type == REDIS_REPLY_ERROR && strncmp(reply->str, word, strlen(word)) == 0;
}

// --------------------------------------------------------------------------------------------------------- up and down

static void hang_up(eng_redis_link *link) {
    for (; link->written < link->count; link->written++)
        redisFreeCommand(link->out[(link->first + link->written) % ENG_REDIS_DUE].bytes);
    if (link->context)
        redisFree(link->context);
    link->context = NULL;
    link->state = ENG_REDIS_DOWN;
    link->first = link->count = link->written = 0;
    link->begun = link->unwritten = 0;
}

void eng_redis_link_fail(eng_redis_link *link, const char *why) {
    if (link->state == ENG_REDIS_DOWN)
        return;
    char *text = link->why;
    snprintf(text, sizeof link->why, "Redis at %.100s: %s", link->place.name, why);
    for (char *at = text; *at; at++) // the server's words may be among them
        if (*at < ' ' || *at > '~')
            *at = '?';
    eng_store_tell_fault(link->store, text);
    if (!link->told)
        eng_log(eng_store_logger(link->store), ENG_LOG_WARNING, "%s", text);
    link->told = true;
    bool greeted = link->state == ENG_REDIS_READY;
    hang_up(link);
    link->back_off = greeted || link->back_off == 0 ? FIRST_PAUSE_MS : link->back_off * 2;
    if (link->back_off > LONGEST_PAUSE_MS)
        link->back_off = LONGEST_PAUSE_MS;
    link->jitter = link->jitter * 1664525u + 1013904223u; // so that many clients of one server do not come as one
    link->retry_at = eng_store_clock() + link->back_off / 2 + link->jitter % (uint32_t)link->back_off;
    if (greeted)
        link->lost(link->context_of);
}

static eng_redis_due greeting_due(greeting step, uint32_t index) {
    return (eng_redis_due){.task = -1, .step = (int)step, .index = index, .script = ENG_REDIS_SCRIPTS};
}

static void greet(eng_redis_link *link) {
    const eng_redis_place *place = &link->place;
    eng_redis_args auth = {0}, database = {0}, info = {0}, fsync = {0}, time = {0};
    link->state = ENG_REDIS_GREETING;
    eng_redis_add_text(&auth, "AUTH");
    if (place->user[0])
        eng_redis_add_text(&auth, place->user);
    eng_redis_add_text(&auth, place->password);
    if (place->password[0])
        eng_redis_command(link, &auth, greeting_due(AUTH, 0));
    eng_redis_add_text(&database, "SELECT");
    eng_redis_add_number(&database, place->database);
    if (place->database)
        eng_redis_command(link, &database, greeting_due(SELECT, 0));
    eng_redis_add_text(&info, "INFO");
    eng_redis_command(link, &info, greeting_due(INFO, 0));
    eng_redis_add_text(&fsync, "CONFIG");
    eng_redis_add_text(&fsync, "GET");
    eng_redis_add_text(&fsync, "appendfsync");
    eng_redis_command(link, &fsync, greeting_due(FSYNC, 0));
    for (uint32_t i = 0; i < ENG_REDIS_SCRIPTS; i++) {
        eng_redis_args load = {0};
        eng_redis_add_text(&load, "SCRIPT");
        eng_redis_add_text(&load, "LOAD");
        eng_redis_add_text(&load, link->text[i]);
        eng_redis_command(link, &load, greeting_due(LOAD, i));
    }
    eng_redis_add_text(&time, "TIME");
    eng_redis_command(link, &time, greeting_due(TIME, 0));
}

static void connect_to(eng_redis_link *link, int64_t now) {
    const eng_redis_place *place = &link->place;
    link->context =
        place->path[0] ? redisConnectUnixNonBlock(place->path) : redisConnectNonBlock(place->host, place->port);
    link->state = ENG_REDIS_CONNECTING;
    link->received = 0;
    link->connect_until = now + (link->time_limit_ms < CONNECT_MS ? link->time_limit_ms : CONNECT_MS);
    if (!link->context)
        eng_redis_link_fail(link, "out of memory for a connection");
    else if (link->context->err)
        eng_redis_link_fail(link, link->context->errstr);
    else
        link->context->reader->maxbuf = 1 << 20;
}

// When the server has kept silence for too long.
static int64_t patience(const eng_redis_link *link) {
    int64_t since = link->due[link->first].sent_at;
    return (since > link->active_at ? since : link->active_at) + link->time_limit_ms;
}

void eng_redis_link_drive(eng_redis_link *link, int64_t now) {
    if (link->state == ENG_REDIS_DOWN && now >= link->retry_at)
        connect_to(link, now);
    else if ((link->state == ENG_REDIS_CONNECTING || link->state == ENG_REDIS_GREETING) && now >= link->connect_until)
        eng_redis_link_fail(link, link->state == ENG_REDIS_CONNECTING ? "connecting takes too long"
                                                                      : "the server does not answer a greeting");
    else if (link->count && now >= patience(link))
        eng_redis_link_fail(link, "the server does not answer");
}

int64_t eng_redis_link_alarm(const eng_redis_link *link) {
    if (link->state == ENG_REDIS_DOWN)
        return link->retry_at;
    if (link->state != ENG_REDIS_READY)
        return link->connect_until;
    return link->count ? patience(link) : INT64_MAX;
}

// ------------------------------------------------------------------------------------------------------------ greeting

// The value of "NAME:" in what INFO tells.
static const char *told(const redisReply *info, const char *name) {
    size_t length = strlen(name);
    for (const char *line = info->str; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, length) == 0 && line[length] == ':')
            return line + length + 1;
    }
    return NULL;
}

static void take_info(eng_redis_link *link, const redisReply *reply) {
    if (reply->type != REDIS_REPLY_STRING) {
        eng_redis_link_fail(link, "is no Redis server, or tells this user nothing of itself (INFO)");
        return;
    }
    const char *version = told(reply, "redis_version"), *role = told(reply, "role"), *log = told(reply, "aof_enabled"),
               *policy = told(reply, "maxmemory_policy");
    if (!version || atoi(version) < 7)
        eng_redis_link_fail(link, "the server is older than Redis 7");
    else if (role && strncmp(role, "slave", 5) == 0)
        eng_redis_link_fail(link, "is a replica, which cannot be written");
    link->risks &= ~(unsigned)(NOT_KEPT | EVICTS);
    if (log && *log == '0')
        link->risks |= NOT_KEPT;
    if (policy && strncmp(policy, "noeviction", 10) != 0)
        link->risks |= EVICTS;
}

static void take_fsync(eng_redis_link *link, const redisReply *reply) {
    link->risks &= ~(unsigned)NOT_SYNCED; // a user that may not ask is not warned either
    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 && reply->element[1]->type == REDIS_REPLY_STRING &&
        strcmp(reply->element[1]->str, "always") != 0)
        link->risks |= NOT_SYNCED;
}

static void take_time(eng_redis_link *link, const redisReply *reply) {
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != 2 || reply->element[0]->type != REDIS_REPLY_STRING ||
        reply->element[1]->type != REDIS_REPLY_STRING)
        return;
    link->clock = strtoll(reply->element[0]->str, NULL, 10) * 1000 + strtoll(reply->element[1]->str, NULL, 10) / 1000 -
                  eng_store_clock();
}

static void welcome(eng_redis_link *link) {
    const char *name = link->place.name;
    link->state = ENG_REDIS_READY;
    link->back_off = 0;
    if (link->told)
        eng_log(eng_store_logger(link->store), ENG_LOG_INFO, "Redis at %s: connected again", name);
    link->told = false;
    unsigned risks = link->risks == link->warned ? 0 : link->risks;
    link->warned = link->risks;
    if (risks & NOT_KEPT)
        eng_log(eng_store_logger(link->store), ENG_LOG_WARNING,
                "Redis at %s: appendonly is no: what is acknowledged is lost when it ends", name);
    else if (risks & NOT_SYNCED)
        eng_log(eng_store_logger(link->store), ENG_LOG_WARNING,
                "Redis at %s: appendfsync is not always: a power cut may lose what is acknowledged", name);
    if (risks & EVICTS)
        eng_log(eng_store_logger(link->store), ENG_LOG_WARNING,
                "Redis at %s: maxmemory-policy is not noeviction: it may drop sessions", name);
}

static void take_greeting(eng_redis_link *link, const eng_redis_due *due, const redisReply *reply) {
    char text[160];
    bool wrong = reply->type == REDIS_REPLY_ERROR;
    if (due->step == FSYNC || due->step == TIME)
        wrong = false;
    if (due->step == AUTH && wrong) {
        snprintf(text, sizeof text, "refuses user or password (%.*s)", (int)strcspn(reply->str, " "), reply->str);
        eng_redis_link_fail(link, text);
    } else if (due->step != INFO && wrong) {
        snprintf(text, sizeof text, "%.150s", reply->str);
        eng_redis_link_fail(link, text);
    } else if (due->step == INFO && (eng_redis_says(reply, "NOAUTH") || eng_redis_says(reply, "LOADING"))) {
        eng_redis_link_fail(link, *reply->str == 'N' ? "asks for a password" : "is loading its data");
    } else if (due->step == INFO) {
        take_info(link, reply);
    } else if (due->step == FSYNC) {
        take_fsync(link, reply);
    } else if (due->step == LOAD) {
        link->loaded[due->index] = reply->type == REDIS_REPLY_STRING && reply->len == 40;
        if (link->loaded[due->index])
            memcpy(link->sha[due->index], reply->str, 41);
    } else if (due->step == TIME) {
        take_time(link, reply);
        welcome(link);
    }
}

// ---------------------------------------------------------------------------------------------------------- in and out

short eng_redis_link_events(const eng_redis_link *link) {
    if (link->state == ENG_REDIS_DOWN)
        return 0;
    if (link->state == ENG_REDIS_CONNECTING)
        return POLLOUT;
    return (short)(link->unwritten ? POLLIN | POLLOUT : POLLIN);
}

static bool connected(eng_redis_link *link) {
    int fault = 0;
    socklen_t length = sizeof fault;
    if (getsockopt(link->context->fd, SOL_SOCKET, SO_ERROR, &fault, &length) != 0)
        fault = errno;
    if (fault)
        eng_redis_link_fail(link, strerror(fault));
    return fault == 0;
}

static void take(eng_redis_link *link, redisReply *reply) {
    if (link->written == 0) {
        eng_redis_link_fail(link, "the server says what nobody asked for");
        freeReplyObject(reply);
        return;
    }
    eng_redis_due due = link->due[link->first];
    link->first = (link->first + 1) % ENG_REDIS_DUE;
    link->count--;
    link->written--;
    if (due.step == AUTH || due.step > AUTH)
        take_greeting(link, &due, reply);
    else if (due.step == ENG_REDIS_STEP_TIME)
        take_time(link, reply);
    else {
        if (due.script < ENG_REDIS_SCRIPTS && eng_redis_says(reply, "NOSCRIPT"))
            link->loaded[due.script] = false;
        else if (due.whole && reply->type != REDIS_REPLY_ERROR)
            link->loaded[due.script] = link->sha[due.script][0] != 0;
        link->take(link->context_of, &due, reply);
        return;
    }
    freeReplyObject(reply);
}

// False: the connection is gone.
static bool take_all(eng_redis_link *link) {
    void *reply = NULL;
    while (link->state != ENG_REDIS_DOWN) {
        if (redisGetReplyFromReader(link->context, &reply) != REDIS_OK) {
            eng_redis_link_fail(link, "the server does not speak Redis' protocol");
            return false;
        }
        if (!reply)
            return true;
        link->received = 0;
        take(link, reply);
    }
    return false;
}

static void read_some(eng_redis_link *link) {
    for (int i = 0; i < 64; i++) {
        size_t before = link->context->reader->len;
        if (redisBufferRead(link->context) != REDIS_OK) {
            eng_redis_link_fail(link, link->context->errstr);
            return;
        }
        size_t count = link->context->reader->len - before;
        link->received += count;
        if (count)
            link->active_at = eng_store_clock();
        if (link->received > MOST_IN)
            eng_redis_link_fail(link, "an answer is longer than any that was asked for");
        if (count == 0 || !take_all(link))
            return;
    }
}

static void count_written(eng_redis_link *link, size_t sent) {
    link->unwritten -= sent;
    while (sent > 0) {
        eng_redis_out *out = &link->out[(link->first + link->written) % ENG_REDIS_DUE];
        size_t rest = out->length - link->begun;
        if (sent < rest) {
            link->begun += sent;
            return;
        }
        sent -= rest;
        link->begun = 0;
        link->written++;
        redisFreeCommand(out->bytes);
    }
}

static void write_some(eng_redis_link *link) {
    struct iovec parts[64];
    struct msghdr message = {.msg_iov = parts};
    size_t begun = link->begun;
    for (uint32_t i = link->written; i < link->count && message.msg_iovlen < 64; i++, begun = 0) {
        const eng_redis_out *out = &link->out[(link->first + i) % ENG_REDIS_DUE];
        parts[message.msg_iovlen++] = (struct iovec){out->bytes + begun, out->length - begun};
    }
    ssize_t sent = sendmsg(link->context->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
        link->active_at = eng_store_clock();
        count_written(link, (size_t)sent);
    } else if (sent < 0 && errno != EAGAIN && errno != EINTR) {
        eng_redis_link_fail(link, strerror(errno));
    }
}

void eng_redis_link_work(eng_redis_link *link, short events) {
    if (events == 0 || link->state == ENG_REDIS_DOWN)
        return;
    if (link->state == ENG_REDIS_CONNECTING) {
        if (connected(link))
            greet(link);
        return;
    }
    if (events & (POLLIN | POLLHUP | POLLERR))
        read_some(link);
    if (link->state != ENG_REDIS_DOWN && link->unwritten > 0 && events & POLLOUT)
        write_some(link);
}

// ------------------------------------------------------------------------------------------------- opening and closing

eng_status eng_redis_link_open(eng_redis_link *link, eng_error *error) {
    for (int i = 0; i < ENG_REDIS_SCRIPTS; i++)
        if (!(link->text[i] = eng_redis_script_text((eng_redis_script)i)))
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store's scripts");
    link->clock = eng_store_wall_clock() - eng_store_clock(); // until the server's is known
    return ENG_OK;
}

void eng_redis_link_close(eng_redis_link *link) {
    hang_up(link);
    for (int i = 0; i < ENG_REDIS_SCRIPTS; i++)
        free(link->text[i]);
}
