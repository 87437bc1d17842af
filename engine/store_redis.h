// SPDX-License-Identifier: Apache-2.0
// What the parts of a store in Redis share: where the server is, the connection to it, the tasks under way.
//
// store_redis.c lives in eng_store_run and owns the tasks; store_redis_link.c owns the connection and knows nothing of
// records; store_redis_write.c and store_redis_read.c know what each operation says to the server and what its answers
// mean; store_redis_scripts.c holds what happens inside it. Everything is for the store's thread, but for opening,
// closing and waking.
#ifndef ENGINE_STORE_REDIS_H
#define ENGINE_STORE_REDIS_H

#include <hiredis/hiredis.h>

#include "engine/store_internal.h"

// --------------------------------------------------------------------------------------------------------------- place

typedef struct eng_redis_place {
    char user[128], password[512]; // empty: none
    char host[256], path[108];     // one of them; path: of a unix socket
    int port, database;
    char name[288]; // for texts: without user and password
} eng_redis_place;

// redis://[USER:PASSWORD@]HOST[:PORT][/DB] or redis+unix://[USER:PASSWORD@]/PATH[?db=DB]; user and password may hold
// %XX.
ENG_CHECKED eng_status eng_redis_read_place(const char *text, eng_redis_place *out, eng_error *error);

// ------------------------------------------------------------------------------------------------------------- scripts

typedef enum eng_redis_script {
    ENG_REDIS_PEEK,
    ENG_REDIS_WRITE,
    ENG_REDIS_READ,
    ENG_REDIS_FIND,
    ENG_REDIS_DELETE,
    ENG_REDIS_LIST,
    ENG_REDIS_LEASE,
    ENG_REDIS_RELEASE,
    ENG_REDIS_USAGE,
    ENG_REDIS_WISHES,
    ENG_REDIS_SWEEP,
    ENG_REDIS_TOUCH,
    ENG_REDIS_SCRIPTS
} eng_redis_script;

enum { ENG_REDIS_SMALL_PIECES = 4 }; // of a payload that travels with its record

#define ENG_REDIS_PREFIX "{mesa}:"

// New text (free) of a script; NULL: out of memory.
char *eng_redis_script_text(eng_redis_script script);

// ---------------------------------------------------------------------------------------------------------- connection

// One command as hiredis takes it. Borrows what is added, but for numbers.
typedef struct eng_redis_args {
    int count, numbers;
    const char *at[32];
    size_t bytes[32];
    char number[16][24];
} eng_redis_args;

void eng_redis_add(eng_redis_args *args, const void *bytes, size_t count);
void eng_redis_add_text(eng_redis_args *args, const char *text);
void eng_redis_add_number(eng_redis_args *args, int64_t number);

// What an answer that is still to come belongs to.
typedef struct eng_redis_due {
    int task;        // its index; -1: of the link itself or of nobody
    uint64_t serial; // of the task's life
    int step;        // what was asked: eng_redis_step, or the link's own
    uint32_t index;
    eng_redis_script script;
    bool whole; // the script was sent as text
    int64_t sent_at;
} eng_redis_due;

typedef enum eng_redis_link_state {
    ENG_REDIS_DOWN,
    ENG_REDIS_CONNECTING,
    ENG_REDIS_GREETING,
    ENG_REDIS_READY
} eng_redis_link_state;

enum { ENG_REDIS_DUE = 2048 };

typedef struct eng_redis_out {
    char *bytes; // hiredis made it
    size_t length;
} eng_redis_out;

typedef struct eng_redis_link {
    eng_store *store;
    eng_redis_place place;
    int32_t time_limit_ms;
    eng_redis_link_state state;
    redisContext *context;
    int64_t connect_until, retry_at, back_off;
    int64_t active_at; // bytes went or came
    int64_t clock;     // the server's milliseconds since 1970 less eng_store_clock
    size_t received;   // since the last whole answer
    eng_redis_due due[ENG_REDIS_DUE];
    uint32_t first, count;
    eng_redis_out out[ENG_REDIS_DUE]; // the commands of these
    uint32_t written;                 // of these, whole
    size_t begun, unwritten;          // bytes of the next one that went, of all that have not
    char *text[ENG_REDIS_SCRIPTS];
    char sha[ENG_REDIS_SCRIPTS][41];
    bool loaded[ENG_REDIS_SCRIPTS];
    char why[256];   // it failed last, with the server's name
    bool told;       // that it cannot be reached
    unsigned risks;  // of the server's settings
    unsigned warned; // of these
    uint32_t jitter;
    void (*take)(void *context, const eng_redis_due *due, redisReply *reply); // *reply is freed by the link
    void (*lost)(void *context);                                              // what was due will not come
    void *context_of;
} eng_redis_link;

ENG_CHECKED eng_status eng_redis_link_open(eng_redis_link *link, eng_error *error);
void eng_redis_link_close(eng_redis_link *link);
// Connects when it is time to, gives up what takes too long.
void eng_redis_link_drive(eng_redis_link *link, int64_t now);
// What to poll for; 0: nothing.
short eng_redis_link_events(const eng_redis_link *link);
int64_t eng_redis_link_alarm(const eng_redis_link *link); // when drive has something to do, INT64_MAX: never
void eng_redis_link_work(eng_redis_link *link, short events);
// Drops the connection. `why` is for the log and the gauges.
void eng_redis_link_fail(eng_redis_link *link, const char *why);
bool eng_redis_link_is_open(const eng_redis_link *link);  // for a command
bool eng_redis_link_has_room(const eng_redis_link *link); // for a large one
// *args begins with the arguments behind the script's key.
void eng_redis_call(eng_redis_link *link, eng_redis_script script, const char *key, const eng_redis_args *args,
                    eng_redis_due due);
void eng_redis_command(eng_redis_link *link, const eng_redis_args *args, eng_redis_due due);
int64_t eng_redis_time(const eng_redis_link *link); // the server's, as far as it is known
// Whether the text of an error begins with the word.
bool eng_redis_says(const redisReply *reply, const char *word);

// --------------------------------------------------------------------------------------------------------------- tasks

typedef enum eng_redis_step {
    ENG_REDIS_STEP_PEEK,  // the record's head, room for a large payload
    ENG_REDIS_STEP_QUEUE, // a part of STAGE that fails alone
    ENG_REDIS_STEP_STAGE,
    ENG_REDIS_STEP_WRITE,
    ENG_REDIS_STEP_LAST, // entry of the journal
    ENG_REDIS_STEP_READ,
    ENG_REDIS_STEP_PIECE,
    ENG_REDIS_STEP_FIND,
    ENG_REDIS_STEP_DELETE,
    ENG_REDIS_STEP_LIST,
    ENG_REDIS_STEP_LEASE,
    ENG_REDIS_STEP_RELEASE,
    ENG_REDIS_STEP_USAGE,
    ENG_REDIS_STEP_WISHES,
    ENG_REDIS_STEP_MEMBER, // a WRITE that waits for its group's EXEC
    // without a task
    ENG_REDIS_STEP_EXEC,
    ENG_REDIS_STEP_SWEEP,
    ENG_REDIS_STEP_TIME,
    ENG_REDIS_STEP_IGNORE,
    ENG_REDIS_STEPS // the link's own begin here
} eng_redis_step;

enum { ENG_REDIS_TASKS = 128, ENG_REDIS_NAME = 1 + 2 * ENG_STORE_ID_BYTES + 1 };

typedef struct eng_redis_task {
    eng_store_job *job; // NULL: nobody's
    uint64_t serial;
    char name[ENG_REDIS_NAME]; // of the record: kind and id; empty: none
    bool waiting;              // for the task before it on the same record
    int next;                  // the one behind it; -1: none
    eng_redis_step step;
    int64_t deadline, retry_at;
    int pending; // answers
    int attempts, reliefs, stale;
    bool force;         // a snapshot has to go before anything else
    bool sent_before;   // a write, and its answer got lost
    bool fresh;         // `old` was asked for in this attempt
    bool staged, large; // of a PUT's payload
    bool has_old;
    eng_store_head old, new_head;
    uint32_t sent, done, furthest; // pieces
    bool lacking;                  // pieces of the generation below were not there
    uint64_t lacking_generation;
    redisReply *kept;                        // of READ, while its pieces come
    unsigned char after[ENG_STORE_ID_BYTES]; // LIST
} eng_redis_task;

typedef struct eng_redis_hint {
    char name[ENG_REDIS_NAME];
    eng_store_head head;
} eng_redis_hint;

enum { ENG_REDIS_HINTS = 4096, ENG_REDIS_TOUCHES = 256 };

typedef struct eng_redis {
    eng_store *store;
    eng_redis_link link;
    int wake; // eventfd
    uint64_t budget, generation;
    eng_redis_task task[ENG_REDIS_TASKS];
    int live;                             // tasks
    int turn;                             // the task whose pieces are looked at first
    bool grouping;                        // writes that are sent now are members
    eng_redis_due group[ENG_REDIS_TASKS]; // that the server has queued
    uint32_t grouped;
    eng_redis_hint *hint; // heads as they were last seen, so that a write may try without asking
    char touched[ENG_REDIS_TOUCHES][ENG_REDIS_NAME];
    int touches;
    int64_t sweep_at;
} eng_redis;

void eng_redis_finish(eng_redis *r, eng_redis_task *task, eng_status status);
// From the start, in `delay_ms`; fails the task when that has been done too often.
void eng_redis_again(eng_redis *r, eng_redis_task *task, int64_t delay_ms, const char *why);
void eng_redis_begin(eng_redis *r, eng_redis_task *task); // its first step
void eng_redis_progress(eng_redis *r, eng_redis_task *task, uint32_t pieces);
eng_redis_due eng_redis_due_of(const eng_redis *r, const eng_redis_task *task, uint32_t index);
// "late": the server came to it after its time.
bool eng_redis_is_late(eng_redis *r, eng_redis_task *task, const redisReply *reply);
void eng_redis_add_until(eng_redis *r, const eng_redis_task *task, eng_redis_args *args); // which time that is
// An answer that has not the form it should have.
void eng_redis_strange(eng_redis *r, eng_redis_task *task);
bool eng_redis_is_text(const redisReply *reply, const char *text);
const redisReply *eng_redis_element(const redisReply *reply, size_t i); // NULL where there is none
int64_t eng_redis_number(const redisReply *reply);                      // 0 where it is none
void eng_redis_hex(const unsigned char *bytes, size_t count, char *out);

eng_redis_hint *eng_redis_hint_of(eng_redis *r, const char *name);
void eng_redis_remember(eng_redis *r, const char *name, const eng_store_head *head); // NULL: nothing is known
void eng_redis_touch(eng_redis *r, const char *name);
void eng_redis_send_touches(eng_redis *r);

// PUT, APPEND, EXPIRE: sends what may be sent; takes an answer.
void eng_redis_begin_write(eng_redis *r, eng_redis_task *task);
void eng_redis_send_write(eng_redis *r, eng_redis_task *task);
void eng_redis_drop_staged(eng_redis *r, eng_redis_task *task); // what was sent ahead and is of no use now
void eng_redis_take_write(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, const redisReply *reply);
// The others. True: the reply is kept.
void eng_redis_send_read(eng_redis *r, eng_redis_task *task);
bool eng_redis_take_read(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, redisReply *reply);

#endif
