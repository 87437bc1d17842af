// SPDX-License-Identifier: Apache-2.0
// Every limit of the server in one place.
//
// SRV_DEFAULT_* are the defaults of configuration keys (config.c prints them in --help); SRV_MAX_* and the rest are
// fixed bounds that no configuration lifts. A buffer, queue or list of this folder takes its maximum from here or from
// the configuration; crossing one is an answer with 400, 413 or 429, never growth.
#ifndef SERVER_LIMITS_H
#define SERVER_LIMITS_H

// Configuration defaults.
#define SRV_DEFAULT_LISTEN "127.0.0.1:8080"
#define SRV_DEFAULT_DEVICE "auto"
#define SRV_DEFAULT_FAST "no"
#define SRV_DEFAULT_STATE_STORAGE "float32"
#define SRV_DEFAULT_ALLOW_ANONYMOUS "no"
#define SRV_DEFAULT_SOCKET_MODE "0660"
#define SRV_DEFAULT_LOG_LEVEL "info"
#define SRV_DEFAULT_ROWS "0"
#define SRV_DEFAULT_STATE_BUDGET "0"
#define SRV_DEFAULT_SESSION_BUDGET "1G"
#define SRV_DEFAULT_SESSION_HISTORY "1048576"
#define SRV_DEFAULT_STORE "auto"
#define SRV_DEFAULT_STORE_BUDGET "4G"
#define SRV_DEFAULT_STORE_LEASE "15"
#define SRV_DEFAULT_STORE_PREFIXES "512"
#define SRV_DEFAULT_PREFIX_BUDGET "1G"
#define SRV_DEFAULT_SNAPSHOT_TOKENS "1024"
#define SRV_DEFAULT_PREFIX_AUDIT "256"
#define SRV_DEFAULT_MAX_BODY "16M"
#define SRV_DEFAULT_BODY_MEMORY "256M"
#define SRV_DEFAULT_MAX_HEADERS "16K"
#define SRV_DEFAULT_HEADER_TIME "10"
#define SRV_DEFAULT_BODY_TIME "60"
#define SRV_DEFAULT_IDLE_TIME "75"
#define SRV_DEFAULT_CONNECTIONS "1024"
#define SRV_DEFAULT_QUEUE_REQUESTS "256"
#define SRV_DEFAULT_QUEUE_TOKENS "1048576"
#define SRV_DEFAULT_KEY_QUEUE "0.5"
#define SRV_DEFAULT_DEGRADE_QUEUE "0.5"
#define SRV_DEFAULT_MAX_TOKENS "65536"
#define SRV_DEFAULT_MAX_PROMPT_TOKENS "1048576"
#define SRV_DEFAULT_MAX_PROMPTS "1024"
#define SRV_DEFAULT_DRAIN_TIME "30"
#define SRV_DEFAULT_PING "0"
#define SRV_DEFAULT_MIN_CG_TOLERANCE "0"
#define SRV_DEFAULT_MAX_CG_STEPS "256"
#define SRV_DEFAULT_MAX_LOOPS "256"
#define SRV_DEFAULT_ALLOW_EXACT "yes"

enum {
    // Requests.
    SRV_CHAT_MAX_TOKENS = 4096, // of a chat that does not say
    SRV_MAX_MESSAGES = 4096,
    SRV_MAX_STOPS = 16,
    SRV_MAX_STOP_BYTES = 1024,
    SRV_MAX_CHOICES = 1024, // prompts times n
    SRV_MAX_N = 128,
    SRV_MAX_BIAS = 100,
    SRV_MAX_CG_STEPS = 256,
    SRV_MAX_LOOPS = 256,
    // A body may hold this many JSON values beside one for each permitted prompt id: without the bound 16 MiB of "[],"
    // would cost the parser about fifty times their size.
    SRV_SPARE_JSON_VALUES = 65536,
    // What a refused request may still send before the connection is closed instead.
    SRV_REFUSED_BODY_BYTES = 65536,

    // Answers. A stream's client may lag this far behind before its request is paused; resumed at half of it.
    SRV_STREAM_WINDOW_BYTES = 65536,
    SRV_STREAM_WINDOW_MIN_BYTES = 4096, // for one of many choices
    SRV_STREAM_SCRATCH_BYTES = 262144,  // one formatted event: its text may grow sixfold by escapes
    SRV_MAX_TEXT_BYTES = 64 << 20,      // one choice that is not streamed
    SRV_MAX_TOKEN_BYTES = 256 << 20,    // tokens and alternatives of one choice that is not streamed
    SRV_MAX_ANSWER_BYTES = 512 << 20,   // the JSON of one answer

    // Connections.
    SRV_LISTEN_BACKLOG = 1024,
    SRV_CONNECTION_SPARE_BYTES = 16384, // of libmicrohttpd's pool, beside the header bytes
    SRV_SWEEP_MS = 250,                 // how often deadlines are looked at
    SRV_SWEEPS_A_LOOK = 4,              // and whether who was to send has left
    SRV_DRAIN_POLL_MS = 50,
    SRV_DRAIN_GRACE_MS = 500, // for the last events after the drain deadline
    SRV_PARK_MS = 5000,       // for sessions to be parked, where the drain time is over
    SRV_STORE_LOOK_MS = 1000,

    // Retry-After in seconds. Of a full queue it is estimated (worker_queue.c), within 1 and the most.
    SRV_RETRY_FULL_S = 1,
    SRV_RETRY_MOST_S = 300,
    SRV_RETRY_LOADING_S = 5,

    // Keys.
    SRV_MAX_KEYS = 4096,
    SRV_MAX_KEY_NAME = 64,
    SRV_MIN_KEY_BYTES = 16,
    SRV_MAX_KEY_LIMIT = 1000000,
    SRV_MAX_KEY_FILE_BYTES = 1 << 20,
    SRV_MAX_PEM_BYTES = 1 << 20,

    // Configuration and log.
    SRV_MAX_MODELS = 32,   // times devices
    SRV_DEVICE_BYTES = 32, // of a device's name, with its NUL
    SRV_MAX_SESSIONS = 1 << 16,
    SRV_SESSION_TTL_S = 3600,
    SRV_MAX_SESSION_TTL_S = 30 * 86400,
    SRV_SESSION_SWEEP_MS = 1000,
    SRV_SESSION_BODY_BYTES = 1 << 16, // of what is parsed on the loop's thread
    SRV_MAX_LISTENERS = 16,
    SRV_MAX_CONFIG_BYTES = 1 << 20,
    SRV_MAX_LOG_LINE = 4096,
};

#endif
