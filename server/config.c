// SPDX-License-Identifier: Apache-2.0
// The table of options and the four sources that fill it, weakest first: defaults, file, environment, command line.
//
// One row an option: its name, how its value is read, where it is kept, its range, its default and its help. Help, the
// printed configuration, the environment's names and the file's keys all come from the row. One thread at a time.
#include "server/config_private.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef enum source { DEFAULT, FROM_FILE, FROM_ENVIRONMENT, FROM_COMMAND_LINE } source;
typedef srv_option option;

static const char *const levels[] = {"debug", "info", "warning", "error", NULL}; // by eng_log_level
static const char *const storages[] = {"float32", "bf16", NULL};                 // by eng_state_storage
const char *const *const srv_config_choices[SRV_OPTION_KINDS] = {
    [SRV_OPTION_LEVEL] = levels, [SRV_OPTION_STORAGE] = storages};

#define AT(member) offsetof(srv_config, member)
const srv_option srv_config_options[] = {
    {"model", SRV_OPTION_MODELS, AT(models), 0, 0, NULL, "[NAME=]DIR",
     "checkpoint folder to serve; repeat for several, the first is the default; NAME defaults to the folder's name"},
    {"listen", SRV_OPTION_LISTENERS, AT(listen), 0, 0, SRV_DEFAULT_LISTEN, "HOST:PORT|unix:PATH",
     "address to listen on; repeatable"},
    {"admin_listen", SRV_OPTION_LISTENER, AT(admin_listen), 0, 0, NULL, "HOST:PORT|unix:PATH",
     "address that serves /metrics and health to anyone who reaches it, and nothing else"},
    {"keys", SRV_OPTION_PATH, AT(keys), 0, 0, NULL, "FILE",
     "bearer keys, a line each: NAME SHA256HEX [rate=N] [max_requests=N] [models=A,B]; see --hash-key"},
    {"allow_anonymous", SRV_OPTION_YES_NO, AT(allow_anonymous), 0, 0, SRV_DEFAULT_ALLOW_ANONYMOUS, "yes|no",
     "serve without keys on addresses that other machines reach"},
    {"tls_cert", SRV_OPTION_PATH, AT(tls_cert), 0, 0, NULL, "FILE",
     "certificate chain (PEM): TLS on every TCP address of --listen"},
    {"tls_key", SRV_OPTION_PATH, AT(tls_key), 0, 0, NULL, "FILE", "its private key (PEM)"},
    {"device", SRV_OPTION_TEXT, AT(device), 0, 0, SRV_DEFAULT_DEVICE, "NAME,...",
     "cpu, cuda:N, or auto: cuda:0 where it can be had, else the CPU; each model is on every device of a list"},
    {"socket_mode", SRV_OPTION_MODE, AT(socket_mode), 0, 0777, SRV_DEFAULT_SOCKET_MODE, "OCTAL",
     "access mode of unix sockets"},
    {"fast", SRV_OPTION_YES_NO, AT(fast), 0, 0, SRV_DEFAULT_FAST, "yes|no",
     "whether a GPU may round activations to bfloat16 in products: quicker, other last digits"},
    {"state_storage", SRV_OPTION_STORAGE, AT(state_storage), 0, 0, SRV_DEFAULT_STATE_STORAGE, "TYPE",
     "float32, or on a GPU bf16: matrix states in half the memory, rounded after each token"},
    {"log_level", SRV_OPTION_LEVEL, AT(log_level), 0, 0, SRV_DEFAULT_LOG_LEVEL, "LEVEL",
     "debug, info, warning or error"},
    {"rows", SRV_OPTION_AUTO, AT(rows), 1, 4096, "auto", "N",
     "requests that run together; auto: 32 to 64 on the CPU, 256 on CUDA"},
    {"prompt_tokens", SRV_OPTION_AUTO, AT(prompt_tokens), 1, 65536, "auto", "N",
     "prompt tokens that are read between two tokens of a request, one chunk of each prompt; auto: 32 on the CPU, "
     "512 on CUDA"},
    {"state_budget", SRV_OPTION_AUTO_BYTES, AT(state_budget), 1, 1e15, "auto", "BYTES",
     "device memory for states and what waits for a looped model's loops; auto: what the rows need"},
    {"session_budget", SRV_OPTION_BYTES, AT(session_budget), 65536, 1e15, SRV_DEFAULT_SESSION_BUDGET, "BYTES",
     "memory a model for the sessions that are kept: their ids, states and pages of attention"},
    {"session_history", SRV_OPTION_INTEGER, AT(session_history), 1, 1e9, SRV_DEFAULT_SESSION_HISTORY, "N",
     "tokens that are kept of a session, so far back as it may be forked or rolled back"},
    {"store", SRV_OPTION_TEXT, AT(store), 0, 0, SRV_DEFAULT_STORE, "PLACE",
     "where sessions are kept beyond the server's life: a folder, redis://HOST:PORT, which several servers may share, "
     "none, or auto: the folder sessions in $STATE_DIRECTORY where a service manager sets that, else none"},
    {"store_budget", SRV_OPTION_BYTES, AT(store_budget), 1 << 20, 1e15, SRV_DEFAULT_STORE_BUDGET, "BYTES",
     "size of the folder's file at most, or of all that is in the Redis server"},
    {"store_lease", SRV_OPTION_SECONDS, AT(store_lease_ms), 0.1, 3600, SRV_DEFAULT_STORE_LEASE, "SECONDS",
     "for so long another server waits for a session of one that died; it also bounds how long sessions go on while "
     "the "
     "store cannot be reached"},
    {"store_prefixes", SRV_OPTION_INTEGER, AT(store_prefixes), 0, 1e9, SRV_DEFAULT_STORE_PREFIXES, "N",
     "the state behind what prompts have in common goes to the store as well, once a second one began from it, if it "
     "has read so many tokens; prompts ask there if they may be spared as many; 0: it stays in memory"},
    {"prefix_budget", SRV_OPTION_BYTES, AT(prefix_budget), 0, 1e15, SRV_DEFAULT_PREFIX_BUDGET, "BYTES",
     "memory a model for states that prompts which begin alike start from; 0: none are kept"},
    {"snapshot_tokens", SRV_OPTION_INTEGER, AT(snapshot_tokens), 1, 1e9, SRV_DEFAULT_SNAPSHOT_TOKENS, "N",
     "tokens between the states that are kept along a prompt"},
    {"prefix_audit", SRV_OPTION_INTEGER, AT(prefix_audit), 0, 1e9, SRV_DEFAULT_PREFIX_AUDIT, "N",
     "one of so many states that prompts start from is read again and compared; 0, or with fast: none"},
    {"queue_requests", SRV_OPTION_INTEGER, AT(queue_requests), 1, 1e6, SRV_DEFAULT_QUEUE_REQUESTS, "N",
     "requests a model that may wait beyond the rows; more get 429"},
    {"queue_tokens", SRV_OPTION_INTEGER, AT(queue_tokens), 1, 1e9, SRV_DEFAULT_QUEUE_TOKENS, "N",
     "prompt tokens a model that may wait; more get 429"},
    {"key_queue", SRV_OPTION_NUMBER, AT(key_queue), 0, 1, SRV_DEFAULT_KEY_QUEUE, "SHARE",
     "share of what may wait that one of several keys may hold"},
    {"degrade_queue", SRV_OPTION_NUMBER, AT(degrade_queue), 0, 1, SRV_DEFAULT_DEGRADE_QUEUE, "SHARE",
     "with more than this share of what may wait waiting, requests run as loosely as their degrade permits"},
    {"max_body", SRV_OPTION_BYTES, AT(max_body), 1024, 1 << 30, SRV_DEFAULT_MAX_BODY, "BYTES", "largest request body"},
    {"body_memory", SRV_OPTION_BYTES, AT(body_memory), 1024, 1e12, SRV_DEFAULT_BODY_MEMORY, "BYTES",
     "memory of all request bodies together; more get 429"},
    {"max_headers", SRV_OPTION_BYTES, AT(max_headers), 1024, 1 << 20, SRV_DEFAULT_MAX_HEADERS, "BYTES",
     "largest request header"},
    {"header_time", SRV_OPTION_SECONDS, AT(header_time_ms), 0.05, 3600, SRV_DEFAULT_HEADER_TIME, "SECONDS",
     "time for a request's header to arrive"},
    {"body_time", SRV_OPTION_SECONDS, AT(body_time_ms), 0.05, 3600, SRV_DEFAULT_BODY_TIME, "SECONDS",
     "time for a request's body to arrive"},
    {"idle_time", SRV_OPTION_SECONDS, AT(idle_time_ms), 1, 86400, SRV_DEFAULT_IDLE_TIME, "SECONDS",
     "time until a silent connection, or a client that stops reading, is closed"},
    {"connections", SRV_OPTION_INTEGER, AT(connections), 1, 1e6, SRV_DEFAULT_CONNECTIONS, "N",
     "connections an address"},
    {"max_tokens", SRV_OPTION_INTEGER, AT(max_tokens), 0, 1e9, SRV_DEFAULT_MAX_TOKENS, "N",
     "largest max_tokens of a request"},
    {"max_prompt_tokens", SRV_OPTION_INTEGER, AT(max_prompt_tokens), 1, 1e9, SRV_DEFAULT_MAX_PROMPT_TOKENS, "N",
     "largest prompt in tokens"},
    {"max_prompts", SRV_OPTION_INTEGER, AT(max_prompts), 1, SRV_MAX_CHOICES, SRV_DEFAULT_MAX_PROMPTS, "N",
     "prompts a request"},
    {"drain_time", SRV_OPTION_SECONDS, AT(drain_time_ms), 0, 86400, SRV_DEFAULT_DRAIN_TIME, "SECONDS",
     "time for running requests to finish after SIGTERM"},
    {"ping", SRV_OPTION_SECONDS, AT(ping_ms), 0, 3600, SRV_DEFAULT_PING, "SECONDS",
     "comment line in streams that are silent for this long; 0: none"},
    {"min_cg_tolerance", SRV_OPTION_NUMBER, AT(min_cg_tolerance), 0, 1, SRV_DEFAULT_MIN_CG_TOLERANCE, "X",
     "smallest cg_tolerance of a request"},
    {"max_cg_steps", SRV_OPTION_INTEGER, AT(max_cg_steps), 0, SRV_MAX_CG_STEPS, SRV_DEFAULT_MAX_CG_STEPS, "N",
     "largest cg_max_steps of a request"},
    {"max_loops", SRV_OPTION_INTEGER, AT(max_loops), 1, SRV_MAX_LOOPS, SRV_DEFAULT_MAX_LOOPS, "N",
     "largest max_loops of a request; the model's own number bounds it too"},
    {"allow_exact", SRV_OPTION_YES_NO, AT(allow_exact), 0, 0, SRV_DEFAULT_ALLOW_EXACT, "yes|no",
     "whether requests may ask for cg_mode exact"},
};
enum { OPTION_COUNT = sizeof srv_config_options / sizeof *srv_config_options };
const size_t srv_config_option_count = OPTION_COUNT;

typedef struct loader {
    srv_config *config;
    source set_by[OPTION_COUNT];
    eng_error *error;
} loader;

// ---- values --------------------------------------------------------------------------------------------------------

static eng_status read_integer(const char *text, double low, double high, bool suffixes, int64_t *out) {
    char *end;
    int64_t unit = 1;

    if (!isdigit((unsigned char)text[0]))
        return ENG_INVALID;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (errno)
        return ENG_INVALID;
    if (suffixes && *end && !end[1]) {
        const char *const units = "KMG", *unit_at = strchr(units, *end);
        if (unit_at) {
            unit = (int64_t)1 << (10 * (unit_at - units + 1));
            end++;
        }
    }
    if (*end || !((double)value * (double)unit >= low && (double)value * (double)unit <= high))
        return ENG_INVALID;
    *out = value * unit;
    return ENG_OK;
}

static eng_status read_number(const char *text, double low, double high, double *out) {
    char *end;

    if (!isdigit((unsigned char)text[0]) && text[0] != '.')
        return ENG_INVALID;
    const double value = strtod(text, &end);
    if (*end || !(value >= low && value <= high))
        return ENG_INVALID;
    *out = value;
    return ENG_OK;
}

static eng_status read_listener(const char *text) {
    int64_t port;

    if (strncmp(text, "unix:", 5) == 0)
        return text[5] ? ENG_OK : ENG_INVALID;
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text)
        return ENG_INVALID;
    return read_integer(colon + 1, 0, 65535, false, &port);
}

static eng_status add_listener(srv_config *config, const char *text) {
    if (read_listener(text))
        return ENG_INVALID;
    if (config->listen_count == SRV_MAX_LISTENERS)
        return ENG_FULL;
    char *copy = strdup(text);
    if (!copy)
        return ENG_NO_MEMORY;
    config->listen[config->listen_count++] = copy;
    return ENG_OK;
}

// The last component of the folder's real path, or of the path as written when there is no such folder.
static char *folder_name(const char *folder) {
    char *path = realpath(folder, NULL);
    if (!path)
        path = strdup(folder);
    if (!path)
        return NULL;
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        path[--length] = '\0';
    const char *slash = strrchr(path, '/');
    char *name = strdup(slash && slash[1] ? slash + 1 : path);
    free(path);
    return name;
}

static eng_status add_model(srv_config *config, const char *text) {
    const char *equals = strchr(text, '='), *slash = strchr(text, '/');
    const bool named = equals && (!slash || equals < slash);
    const char *folder = named ? equals + 1 : text;

    if (!*folder || (named && equals == text))
        return ENG_INVALID;
    if (config->model_count == SRV_MAX_MODELS)
        return ENG_FULL;
    srv_model_path model = {.name = named ? strndup(text, (size_t)(equals - text)) : folder_name(folder),
                            .folder = strdup(folder)};
    eng_status status = model.name && model.folder ? ENG_OK : ENG_NO_MEMORY;
    for (size_t i = 0; !status && i < config->model_count; i++)
        if (strcmp(config->models[i].name, model.name) == 0)
            status = ENG_INVALID;
    if (status) {
        free(model.name);
        free(model.folder);
        return status;
    }
    config->models[config->model_count++] = model;
    return ENG_OK;
}

static eng_status set_text(char **member, const char *text) {
    char *copy = *text ? strdup(text) : NULL;
    if (!copy)
        return *text ? ENG_NO_MEMORY : ENG_INVALID;
    free(*member);
    *member = copy;
    return ENG_OK;
}

static eng_status set_mode(int64_t *member, const char *text) {
    char *end;
    const long mode = strtol(text, &end, 8);
    if (!isdigit((unsigned char)text[0]) || *end || mode < 0 || mode > 0777)
        return ENG_INVALID;
    *member = mode;
    return ENG_OK;
}

static eng_status set_choice(int64_t *member, const char *const *choices, const char *text) {
    for (int64_t i = 0; choices[i]; i++)
        if (strcmp(text, choices[i]) == 0) {
            *member = i;
            return ENG_OK;
        }
    return ENG_INVALID;
}

static eng_status set_yes_no(bool *member, const char *text) {
    if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
        return ENG_INVALID;
    *member = text[0] == 'y';
    return ENG_OK;
}

static eng_status set_value(srv_config *config, const option *row, const char *text) {
    void *member = (char *)config + row->offset;
    double number;

    switch (row->kind) {
    case SRV_OPTION_MODELS:
        return add_model(config, text);
    case SRV_OPTION_LISTENERS:
        return add_listener(config, text);
    case SRV_OPTION_LISTENER:
        return read_listener(text) ? ENG_INVALID : set_text(member, text);
    case SRV_OPTION_TEXT:
    case SRV_OPTION_PATH:
        return set_text(member, text);
    case SRV_OPTION_AUTO:
    case SRV_OPTION_AUTO_BYTES:
        if (strcmp(text, "auto") == 0) {
            *(int64_t *)member = 0;
            return ENG_OK;
        }
        return read_integer(text, row->low, row->high, row->kind == SRV_OPTION_AUTO_BYTES, member);
    case SRV_OPTION_INTEGER:
    case SRV_OPTION_BYTES:
        return read_integer(text, row->low, row->high, row->kind == SRV_OPTION_BYTES, member);
    case SRV_OPTION_SECONDS:
        if (read_number(text, row->low, row->high, &number))
            return ENG_INVALID;
        *(int64_t *)member = llround(number * 1000);
        return ENG_OK;
    case SRV_OPTION_NUMBER:
        return read_number(text, row->low, row->high, member);
    case SRV_OPTION_YES_NO:
        return set_yes_no(member, text);
    case SRV_OPTION_MODE:
        return set_mode(member, text);
    case SRV_OPTION_LEVEL:
    case SRV_OPTION_STORAGE:
        return set_choice(member, srv_config_choices[row->kind], text);
    case SRV_OPTION_KINDS:
        break;
    }
    return ENG_INTERNAL;
}

static void clear_models(srv_config *config) {
    while (config->model_count) {
        srv_model_path *model = &config->models[--config->model_count];
        free(model->name);
        free(model->folder);
    }
}

static void clear_listeners(srv_config *config) {
    while (config->listen_count)
        free(config->listen[--config->listen_count]);
}

// "a, b or c"
static void list_choices(const char *const *choices, char *text, size_t size) {
    size_t length = 0;

    for (size_t i = 0; choices[i] && length < size; i++)
        length += (size_t)snprintf(text + length, size - length, "%s%s",
                                   i == 0           ? ""
                                   : choices[i + 1] ? ", "
                                                    : " or ",
                                   choices[i]);
}

static void describe_range(const option *row, char *text, size_t size) {
    static const char *const by_kind[] = {
        [SRV_OPTION_MODELS] = "[NAME=]DIR, each name once",
        [SRV_OPTION_LISTENERS] = "HOST:PORT with a port of 0 to 65535, or unix:PATH",
        [SRV_OPTION_LISTENER] = "HOST:PORT with a port of 0 to 65535, or unix:PATH",
        [SRV_OPTION_TEXT] = "text",
        [SRV_OPTION_PATH] = "a path or credential:NAME",
        [SRV_OPTION_YES_NO] = "yes or no",
        [SRV_OPTION_MODE] = "an octal mode up to 0777",
    };

    if (srv_config_choices[row->kind])
        list_choices(srv_config_choices[row->kind], text, size);
    else if (row->kind < sizeof by_kind / sizeof *by_kind && by_kind[row->kind])
        snprintf(text, size, "%s", by_kind[row->kind]);
    else
        snprintf(text, size, "%s%.15g to %.15g%s",
                 row->kind == SRV_OPTION_AUTO || row->kind == SRV_OPTION_AUTO_BYTES ? "auto or " : "", row->low,
                 row->high,
                 row->kind == SRV_OPTION_BYTES || row->kind == SRV_OPTION_AUTO_BYTES ? " (K, M, G may follow)" : "");
}

// Sets one option. where: "--rows", "MESA_ROWS" or "FILE:LINE: rows".
static eng_status apply(loader *loader, size_t index, const char *value, source from, const char *where) {
    const option *row = &srv_config_options[index];
    const bool list = row->kind == SRV_OPTION_MODELS || row->kind == SRV_OPTION_LISTENERS;

    if (loader->set_by[index] == from && from != DEFAULT && !list)
        return eng_fail(loader->error, ENG_INVALID, "%s: given twice", where);
    if (row->kind == SRV_OPTION_MODELS && loader->set_by[index] < from)
        clear_models(loader->config);
    if (row->kind == SRV_OPTION_LISTENERS && loader->set_by[index] < from)
        clear_listeners(loader->config);
    loader->set_by[index] = from;
    const eng_status status = set_value(loader->config, row, value);
    if (status == ENG_NO_MEMORY)
        return eng_fail(loader->error, status, "%s: out of memory", where);
    if (status == ENG_FULL)
        return eng_fail(loader->error, status, "%s: given too often", where);
    if (status) {
        char range[128];
        describe_range(row, range, sizeof range);
        return eng_fail(loader->error, ENG_INVALID, "%s: the value must be %s", where, range);
    }
    return ENG_OK;
}

// ---- sources -------------------------------------------------------------------------------------------------------

// Index of the option of this name, '-' counting as '_' if hyphens; OPTION_COUNT: none.
static size_t find_option(const char *name, size_t length, bool hyphens) {
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        size_t k = 0;
        while (k < length && srv_config_options[i].name[k] &&
               (name[k] == srv_config_options[i].name[k] ||
                (hyphens && name[k] == '-' && srv_config_options[i].name[k] == '_')))
            k++;
        if (k == length && !srv_config_options[i].name[k])
            return i;
    }
    return OPTION_COUNT;
}

typedef struct ini_source {
    loader loader; // with an error of its own: a fault of the syntax in an earlier line wins over it
    eng_error error;
    const char *path;
    FILE *file;
    size_t bytes;
    int line, fault_line;
} ini_source;

static void fail_line(ini_source *source, const char *what, const char *name) {
    eng_fail(&source->error, ENG_INVALID, "%s:%d: %s%s", source->path, source->line, what, name);
    source->fault_line = source->line;
}

// inih's reader: counts lines, and refuses what inih would cut in silence.
static char *read_line(char *text, int size, void *context) {
    ini_source *source = context;

    if (source->error.code || !fgets(text, size, source->file))
        return NULL;
    source->line++;
    const size_t length = strlen(text);
    source->bytes += length;
    if (source->bytes > SRV_MAX_CONFIG_BYTES)
        fail_line(source, "the file is larger than 1 MiB", "");
    else if (length == 0 || (text[length - 1] != '\n' && !feof(source->file)))
        fail_line(source, "the line is longer than 198 bytes or holds a NUL", "");
    return source->error.code ? NULL : text;
}

static int on_setting(void *context, const char *section, const char *name, const char *value) {
    ini_source *source = context;
    char where[200];

    if (source->error.code)
        return 0;
    if (strcmp(section, "server") != 0) {
        fail_line(source, "only section [server] is known", "");
        return 0;
    }
    const size_t index = find_option(name, strlen(name), false);
    if (index == OPTION_COUNT) {
        fail_line(source, "unknown key ", name);
        return 0;
    }
    snprintf(where, sizeof where, "%s:%d: %s", source->path, source->line, name);
    if (apply(&source->loader, index, value, FROM_FILE, where) == ENG_OK)
        return 1;
    source->fault_line = source->line;
    return 0;
}

static eng_status load_file(loader *loader, const char *path) {
    struct stat info;
    ini_source source = {.loader = *loader, .path = path, .file = fopen(path, "re")};

    source.loader.error = &source.error;
    if (!source.file)
        return eng_fail(loader->error, ENG_INVALID, "%s: %s", path, strerror(errno));
    if (fstat(fileno(source.file), &info) == 0 && S_ISDIR(info.st_mode)) {
        fclose(source.file);
        return eng_fail(loader->error, ENG_INVALID, "%s: is a directory", path);
    }
    const int fault = ini_parse_stream(read_line, &source, on_setting, &source);
    const bool unreadable = ferror(source.file);
    fclose(source.file);
    memcpy(loader->set_by, source.loader.set_by, sizeof loader->set_by);
    if (unreadable)
        return eng_fail(loader->error, ENG_INVALID, "%s: cannot be read", path);
    if (fault > 0 && (!source.error.code || fault < source.fault_line))
        return eng_fail(loader->error, ENG_INVALID, "%s:%d: neither [section] nor key = value", path, fault);
    if (source.error.code)
        return eng_fail(loader->error, source.error.code, "%s", source.error.text);
    return fault == 0 ? ENG_OK : eng_fail(loader->error, ENG_NO_MEMORY, "%s: cannot be parsed", path);
}

// NAME=VALUE as MESA_OPTION=VALUE: the option's index, OPTION_COUNT for other variables.
static size_t match_environment(const char *variable) {
    char name[64];
    const char *equals = strchr(variable, '=');

    if (strncmp(variable, "MESA_", 5) != 0 || !equals || (size_t)(equals - variable) >= sizeof name)
        return OPTION_COUNT;
    size_t length = 0;
    for (const char *at = variable + 5; at < equals; at++)
        name[length++] = (char)(islower((unsigned char)*at) ? '?' : tolower((unsigned char)*at));
    return find_option(name, length, false);
}

static eng_status apply_environment(loader *loader, size_t index, const char *variable) {
    const char *equals = strchr(variable, '=');
    char where[64];

    snprintf(where, sizeof where, "%.*s", (int)(equals - variable), variable);
    if (srv_config_options[index].kind != SRV_OPTION_MODELS && srv_config_options[index].kind != SRV_OPTION_LISTENERS)
        return apply(loader, index, equals + 1, FROM_ENVIRONMENT, where);
    char *list = strdup(equals + 1), *rest = NULL;
    eng_status status = list ? ENG_OK : eng_fail(loader->error, ENG_NO_MEMORY, "%s: out of memory", where);
    for (char *item = list ? strtok_r(list, ",", &rest) : NULL; item && !status; item = strtok_r(NULL, ",", &rest))
        status = apply(loader, index, item, FROM_ENVIRONMENT, where);
    free(list);
    return status;
}

typedef struct arguments {
    int count, next;
    char *const *values;
} arguments;

// Takes the next argument apart. *name without its dashes, *value NULL when it has none of its own ("--name=value").
static eng_status next_argument(arguments *arguments, const char **name, size_t *length, const char **value,
                                eng_error *error) {
    const char *text = arguments->values[arguments->next++];

    if (strcmp(text, "-h") == 0)
        text = "--help";
    if (strncmp(text, "--", 2) != 0 || !text[2])
        return eng_fail(error, ENG_INVALID, "%s: not an option; --model DIR names a model (see --help)", text);
    const char *equals = strchr(text, '=');
    *name = text + 2;
    *length = equals ? (size_t)(equals - *name) : strlen(*name);
    *value = equals ? equals + 1 : NULL;
    return ENG_OK;
}

static bool is_word(const char *name, size_t length, const char *word) {
    return length == strlen(word) && memcmp(name, word, length) == 0;
}

// Whether the word is one that asks for something else than a server, which *action then says.
static bool take_action(const char *name, size_t length, srv_config_action *action) {
    static const struct {
        const char *word;
        srv_config_action action;
    } actions[] = {{"help", SRV_CONFIG_HELP},
                   {"version", SRV_CONFIG_VERSION},
                   {"hash-key", SRV_CONFIG_HASH_KEY},
                   {"check-config", SRV_CONFIG_CHECK}};

    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (is_word(name, length, actions[i].word)) {
            if (*action == SRV_CONFIG_RUN || *action == SRV_CONFIG_CHECK)
                *action = actions[i].action;
            return true;
        }
    return false;
}

// The value that follows an option of this index. A yes or no may be left out and means yes.
static const char *take_value(arguments *arguments, size_t index) {
    const char *next = arguments->next < arguments->count ? arguments->values[arguments->next] : NULL;

    if (index < OPTION_COUNT && srv_config_options[index].kind == SRV_OPTION_YES_NO &&
        (!next || strncmp(next, "--", 2) == 0))
        return "yes";
    if (next)
        arguments->next++;
    return next;
}

// Walks the command line: once to find --config and the actions (loader NULL), once to apply the options.
static eng_status walk_arguments(arguments arguments, loader *loader, const char **config_path,
                                 srv_config_action *action, eng_error *error) {
    while (arguments.next < arguments.count) {
        const char *name = "", *value = NULL;
        size_t length = 0;
        char where[80];

        if (next_argument(&arguments, &name, &length, &value, error))
            return ENG_INVALID;
        snprintf(where, sizeof where, "--%.*s", (int)(length < 60 ? length : 60), name);
        const bool is_action = take_action(name, length, action);
        if (is_action && !value)
            continue;
        const bool is_config = is_word(name, length, "config");
        const size_t index = find_option(name, length, true);
        if (is_action || (!is_config && index == OPTION_COUNT))
            return eng_fail(error, ENG_INVALID, is_action ? "%s: takes no value" : "%s: unknown option (see --help)",
                            where);
        if (!value)
            value = take_value(&arguments, index);
        if (!value)
            return eng_fail(error, ENG_INVALID, "%s: the value is missing", where);
        if (is_config)
            *config_path = value;
        else if (loader && apply(loader, index, value, FROM_COMMAND_LINE, where))
            return ENG_INVALID;
    }
    return ENG_OK;
}

// ---- devices -------------------------------------------------------------------------------------------------------

size_t srv_config_devices(const srv_config *config) {
    size_t count = 1;

    for (const char *at = config->device; *at; at++)
        count += *at == ',';
    return count;
}

static const char *find_device(const srv_config *config, size_t index, size_t *length) {
    const char *at = config->device;

    while (index-- > 0)
        at += strcspn(at, ",") + 1;
    *length = strcspn(at, ",");
    return at;
}

void srv_config_device(const srv_config *config, size_t index, char out[SRV_DEVICE_BYTES]) {
    size_t length;
    const char *name = find_device(config, index, &length);

    snprintf(out, SRV_DEVICE_BYTES, "%.*s", (int)length, name);
}

static eng_status check_devices(const srv_config *config, eng_error *error) {
    const size_t count = srv_config_devices(config);

    for (size_t i = 0; i < count; i++) {
        char name[SRV_DEVICE_BYTES];
        size_t length;
        eng_error why = {0};
        (void)find_device(config, i, &length);
        if (length == 0 || length >= SRV_DEVICE_BYTES)
            return eng_fail(error, ENG_INVALID, "--device: a name of the list is empty or too long");
        srv_config_device(config, i, name);
        if (eng_check_device(name, &why))
            return eng_fail(error, ENG_INVALID, "--device: %s", why.text);
    }
    if (config->model_count * count > SRV_MAX_MODELS)
        return eng_fail(error, ENG_INVALID, "--device: %zu models on %zu devices, the limit is %d in all",
                        config->model_count, count, SRV_MAX_MODELS);
    return ENG_OK;
}

static eng_status check_whole(const srv_config *config, eng_error *error) {
    if (config->model_count == 0)
        return eng_fail(error, ENG_INVALID, "--model: no model is named");
    if (config->listen_count == 0)
        return eng_fail(error, ENG_INVALID, "--listen: no address is named");
    if (config->body_memory < config->max_body)
        return eng_fail(error, ENG_INVALID, "--body-memory: smaller than --max-body");
    if (!config->tls_cert != !config->tls_key)
        return eng_fail(error, ENG_INVALID, "--tls-cert and --tls-key: one needs the other");
    return check_devices(config, error);
}

static const char *find_variable(char *const *environment, const char *name) {
    const size_t length = strlen(name);

    for (; *environment; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
            return *environment + length + 1;
    return NULL;
}

// "credential:NAME" becomes the path of the file that the service manager has put there.
static eng_status resolve_credentials(srv_config *config, char *const *environment, eng_error *error) {
    static const char prefix[] = "credential:";
    const char *folder = find_variable(environment, "CREDENTIALS_DIRECTORY");

    for (size_t i = 0; i < OPTION_COUNT; i++) {
        char **member = (char **)((char *)config + srv_config_options[i].offset), path[PATH_MAX];
        if (srv_config_options[i].kind != SRV_OPTION_PATH || !*member ||
            strncmp(*member, prefix, sizeof prefix - 1) != 0)
            continue;
        const char *name = *member + sizeof prefix - 1;
        if (!*name || strchr(name, '/'))
            return eng_fail(error, ENG_INVALID, "%s: the name of a credential has no /", srv_config_options[i].name);
        if (!folder || (size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
            return eng_fail(error, ENG_INVALID,
                            "%s: credential:%s needs CREDENTIALS_DIRECTORY, which a service manager sets",
                            srv_config_options[i].name, name);
        const eng_status status = set_text(member, path);
        if (status)
            return eng_fail(error, status, "%s: out of memory", srv_config_options[i].name);
    }
    return ENG_OK;
}

eng_status srv_config_load(srv_config *config, int argument_count, char *const *argument_values,
                           char *const *environment, srv_config_action *action, eng_error *error) {
    *config = (srv_config){.argument_count = argument_count, .arguments = argument_values, .environment = environment};
    *action = SRV_CONFIG_RUN;
    loader loader = {.config = config, .error = error};
    const arguments arguments = {.count = argument_count, .next = 1, .values = argument_values};
    const char *path = NULL;

    eng_status status = walk_arguments(arguments, NULL, &path, action, error);
    if (status || (*action != SRV_CONFIG_RUN && *action != SRV_CONFIG_CHECK))
        return status;
    for (size_t i = 0; i < OPTION_COUNT && !status; i++)
        if (srv_config_options[i].fallback)
            status = apply(&loader, i, srv_config_options[i].fallback, DEFAULT, srv_config_options[i].name);
    if (!path)
        path = find_variable(environment, "MESA_CONFIG");
    if (!status && path)
        status = load_file(&loader, path);
    for (char *const *at = environment; *at && !status; at++) {
        const size_t index = match_environment(*at);
        if (index < OPTION_COUNT)
            status = apply_environment(&loader, index, *at);
    }
    if (!status)
        status = walk_arguments(arguments, &loader, &path, action, error);
    if (!status)
        status = resolve_credentials(config, environment, error);
    return status ? status : check_whole(config, error);
}

void srv_config_free(srv_config *config) {
    clear_models(config);
    clear_listeners(config);
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const srv_option_kind kind = srv_config_options[i].kind;
        if (kind == SRV_OPTION_TEXT || kind == SRV_OPTION_PATH || kind == SRV_OPTION_LISTENER)
            free(*(char **)((char *)config + srv_config_options[i].offset));
    }
    *config = (srv_config){0};
}
