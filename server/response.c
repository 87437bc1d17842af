// SPDX-License-Identifier: Apache-2.0
// The wording of answers. Keys and punctuation are literals here, values go through json_writer.
// Stateless; loop thread and pool threads.
#include "server/response.h"

#include <string.h>

#include "server/json_writer.h"
#include "server/request.h"

// ---- errors --------------------------------------------------------------------------------------------------------

void srv_write_error(srv_buf *out, const srv_problem *problem) {
    srv_buf_puts(out, "{\"error\":{\"message\":");
    srv_json_text(out, problem->message);
    srv_buf_puts(out, ",\"type\":");
    srv_json_text(out, srv_problem_type(problem->status));
    srv_buf_puts(out, ",\"param\":");
    srv_json_text(out, problem->param);
    srv_buf_puts(out, ",\"code\":");
    srv_json_text(out, problem->code);
    srv_buf_puts(out, "}}");
}

void srv_write_error_event(srv_buf *out, const srv_problem *problem) {
    srv_buf_puts(out, "data: ");
    srv_write_error(out, problem);
    srv_buf_puts(out, "\n\n");
}

// ---- usage ---------------------------------------------------------------------------------------------------------

static void write_exits(srv_buf *out, const srv_usage *usage) {
    uint64_t tokens = 0, loops = 0;

    for (int32_t i = 0; i < usage->loops; i++) {
        tokens += usage->exits[i];
        loops += usage->exits[i] * (uint64_t)(i + 1);
    }
    srv_buf_puts(out, "\"loops_mean\":");
    srv_json_number(out, tokens ? (double)loops / (double)tokens : 0);
    srv_buf_puts(out, ",\"exit_histogram\":[");
    for (int32_t i = 0; i < usage->loops; i++) {
        srv_buf_puts(out, i ? "," : "");
        srv_json_integer(out, (int64_t)usage->exits[i]);
    }
    srv_buf_puts(out, "]");
}

static void write_solves(srv_buf *out, const eng_compute *compute) {
    srv_buf_puts(out, "\"cg_steps_mean\":");
    srv_json_number(out, compute->solves ? (double)compute->steps / (double)compute->solves : 0);
    srv_buf_puts(out, ",\"cg_steps_max\":");
    srv_json_integer(out, compute->steps_max);
    srv_buf_puts(out, ",\"cg_unconverged\":");
    srv_json_integer(out, (int64_t)compute->unconverged);
}

// exits: of a looped model's completion.
static void write_compute(srv_buf *out, const srv_usage *usage, const eng_compute *compute, bool exits) {
    srv_buf_puts(out, "{");
    if (usage->has_mesa)
        write_solves(out, compute);
    if (usage->has_mesa && exits)
        srv_buf_puts(out, ",");
    if (exits)
        write_exits(out, usage);
    srv_buf_puts(out, "}");
}

static void write_ignored(srv_buf *out, unsigned ignored) {
    static const struct {
        unsigned mark;
        const char *name;
    } knobs[] = {
        {SRV_GIVEN_CG_TOLERANCE, "cg_tolerance"}, {SRV_GIVEN_CG_MAX_STEPS, "cg_max_steps"},
        {SRV_GIVEN_CG_MODE, "cg_mode"},           {SRV_GIVEN_EXIT_THRESHOLD, "exit_threshold"},
        {SRV_GIVEN_MAX_LOOPS, "max_loops"},       {SRV_GIVEN_ON_UNCONVERGED, "on_unconverged"},
    };
    const char *separator = "";

    srv_buf_puts(out, "[");
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++)
        if (ignored & knobs[i].mark) {
            srv_buf_puts(out, separator);
            srv_json_text(out, knobs[i].name);
            separator = ",";
        }
    srv_buf_puts(out, "]");
}

static void write_session_usage(srv_buf *out, const srv_session_usage *session) {
    if (!session->id)
        return;
    srv_buf_puts(out, ",\"session\":{\"id\":");
    srv_json_text(out, session->id);
    srv_buf_puts(out, ",\"position\":");
    srv_json_integer(out, session->position);
    srv_buf_puts(out, ",\"durable\":");
    srv_json_bool(out, session->durable);
    srv_buf_puts(out, ",\"profile_changed\":");
    srv_json_bool(out, session->profile_changed);
    srv_buf_puts(out, "}");
}

static void write_usage(srv_buf *out, const srv_usage *usage) {
    srv_buf_puts(out, "{\"prompt_tokens\":");
    srv_json_integer(out, usage->prompt_tokens);
    srv_buf_puts(out, ",\"completion_tokens\":");
    srv_json_integer(out, usage->completion_tokens);
    srv_buf_puts(out, ",\"total_tokens\":");
    srv_json_integer(out, usage->prompt_tokens + usage->completion_tokens);
    srv_buf_puts(out, ",\"prompt_tokens_details\":{\"cached_tokens\":");
    srv_json_integer(out, usage->cached_tokens);
    srv_buf_puts(out, "},\"compute\":{\"prompt\":");
    write_compute(out, usage, &usage->prompt, false);
    srv_buf_puts(out, ",\"completion\":");
    write_compute(out, usage, &usage->completion, usage->loops > 0);
    srv_buf_puts(out, ",\"ignored\":");
    write_ignored(out, usage->ignored);
    srv_buf_puts(out, ",\"degraded\":");
    srv_json_bool(out, usage->degraded);
    srv_buf_puts(out, "}");
    write_session_usage(out, &usage->session);
    srv_buf_puts(out, "}");
}

// ---- completions ---------------------------------------------------------------------------------------------------

void srv_head_settle(srv_head *head) {
    enum { MORE = 256 };
    srv_buf *out = &head->json;

    srv_buf_init(out, 6 * strlen(head->model) + MORE); // an escape has six bytes
    srv_buf_puts(out, "{\"id\":");
    srv_json_text(out, head->id);
    srv_buf_puts(out, ",\"object\":");
    srv_json_text(out, head->object);
    srv_buf_puts(out, ",\"created\":");
    srv_json_integer(out, head->created);
    srv_buf_puts(out, ",\"model\":");
    srv_json_text(out, head->model);
}

static void write_head(srv_buf *out, const srv_head *head) {
    srv_buf_append(out, head->json.data, head->json.length);
}

static void write_seed(srv_buf *out, const srv_head *head) {
    srv_buf_puts(out, ",\"seed\":");
    srv_json_integer(out, head->seed);
}

void srv_write_opening(srv_buf *out, const srv_head *head) {
    write_head(out, head);
    write_seed(out, head);
    srv_buf_puts(out, ",\"choices\":[");
}

void srv_write_closing(srv_buf *out, const srv_usage *usage) {
    srv_buf_puts(out, "],\"usage\":");
    write_usage(out, usage);
    srv_buf_puts(out, "}");
}

void srv_write_chunk(srv_buf *out, const srv_head *head, const srv_chunk *chunk) {
    srv_buf_puts(out, "data: ");
    write_head(out, head);
    if (chunk->with_seed)
        write_seed(out, head);
    srv_buf_puts(out, ",\"choices\":[");
    srv_write_choice(out, chunk->form, &chunk->piece);
    srv_buf_puts(out, "]");
    if (chunk->usage) {
        srv_buf_puts(out, ",\"usage\":");
        write_usage(out, chunk->usage);
    } else if (chunk->usage_null)
        srv_buf_puts(out, ",\"usage\":null");
    write_session_usage(out, &chunk->session);
    srv_buf_puts(out, "}\n\n");
}

void srv_write_usage_chunk(srv_buf *out, const srv_head *head, const srv_usage *usage) {
    srv_buf_puts(out, "data: ");
    write_head(out, head);
    srv_buf_puts(out, ",\"choices\":[],\"usage\":");
    write_usage(out, usage);
    srv_buf_puts(out, "}\n\n");
}

void srv_write_done(srv_buf *out) {
    srv_buf_puts(out, "data: [DONE]\n\n");
}

void srv_write_ping(srv_buf *out) {
    srv_buf_puts(out, ": ping\n\n");
}

// ---- models and health ---------------------------------------------------------------------------------------------

static void member_text(srv_buf *out, const char *name, const char *value) {
    srv_buf_printf(out, ",\"%s\":", name);
    srv_json_text(out, value);
}

static void member_integer(srv_buf *out, const char *name, int64_t value) {
    srv_buf_printf(out, ",\"%s\":", name);
    srv_json_integer(out, value);
}

// -1 says "unbounded" or "unknown": null.
static void member_length(srv_buf *out, const char *name, int64_t value) {
    srv_buf_printf(out, ",\"%s\":", name);
    if (value < 0)
        srv_buf_puts(out, "null");
    else
        srv_json_integer(out, value);
}

static const char *mode_name(eng_cg_mode mode) {
    switch (mode) {
    case ENG_CG_TOLERANCE:
        return "tolerance";
    case ENG_CG_STEPS:
        return "steps";
    case ENG_CG_EXACT:
        return "exact";
    case ENG_CG_FIXED:
        break;
    }
    return NULL;
}

static void write_knobs(srv_buf *out, const srv_model_view *model) {
    const eng_model_info *info = model->info;
    const char *separator = "";

    srv_buf_puts(out, ",\"knobs\":{");
    if (info->has_mesa) {
        srv_buf_puts(out, "\"cg_tolerance\":{\"default\":");
        srv_json_float(out, info->default_knobs.cg_tolerance);
        srv_buf_puts(out, ",\"minimum\":");
        srv_json_number(out, model->min_cg_tolerance);
        srv_buf_puts(out, ",\"maximum\":1},\"cg_max_steps\":{\"default\":");
        srv_json_integer(out, info->default_knobs.cg_max_steps);
        srv_buf_puts(out, ",\"minimum\":0,\"maximum\":");
        srv_json_integer(out, model->max_cg_steps);
        srv_buf_puts(out, "},\"cg_mode\":{\"default\":");
        srv_json_text(out, mode_name(info->default_knobs.cg_mode));
        srv_buf_puts(out, ",\"values\":[\"tolerance\",\"steps\"");
        srv_buf_puts(out, model->allow_exact ? ",\"exact\"]}" : "]}");
        separator = ",";
    }
    if (info->has_loops) {
        if (info->has_exit_gate) {
            srv_buf_puts(out, separator);
            srv_buf_puts(out, "\"exit_threshold\":{\"default\":");
            srv_json_float(out, info->default_knobs.exit_threshold);
            srv_buf_puts(out, ",\"minimum\":0,\"maximum\":1}");
            separator = ",";
        }
        srv_buf_puts(out, separator);
        srv_buf_puts(out, "\"max_loops\":{\"default\":");
        srv_json_integer(out, info->default_knobs.max_loops);
        srv_buf_puts(out, ",\"minimum\":1,\"maximum\":");
        srv_json_integer(out, model->max_loops < info->loops ? model->max_loops : info->loops);
        srv_buf_puts(out, "}");
    }
    srv_buf_puts(out, "}");
}

static void write_meta(srv_buf *out, const srv_model_view *model) {
    const eng_model_info *info = model->info;

    srv_buf_puts(out, ",\"meta\":");
    if (!info) {
        srv_buf_puts(out, "null");
        return;
    }
    srv_buf_puts(out, "{\"model_type\":");
    srv_json_text(out, info->model_type);
    member_integer(out, "parameters", (int64_t)info->parameters);
    member_integer(out, "layers", info->layers);
    member_integer(out, "loops", info->loops);
    member_integer(out, "vocab_size", info->vocab_size);
    member_integer(out, "hidden_size", info->hidden_size);
    member_text(out, "mixers", info->mixers);
    member_integer(out, "state_bytes", (int64_t)info->state_bytes);
    member_integer(out, "kv_bytes_per_token", (int64_t)info->kv_bytes_per_token);
    member_length(out, "context_length", info->context_length);
    member_length(out, "trained_length", info->trained_length);
    member_text(out, "device", info->device);
    member_text(out, "numeric_profile", info->numeric_profile);
    member_text(out, "fingerprint", info->fingerprint.states);
    member_integer(out, "rows", info->max_rows);
    member_integer(out, "chunk", info->chunk);
    srv_buf_puts(out, ",\"fast\":");
    srv_json_bool(out, info->fast);
    member_integer(out, "prefix_audit", (int64_t)info->prefix_audit);
    srv_buf_puts(out, ",\"has_tokenizer\":");
    srv_json_bool(out, info->has_tokenizer);
    write_knobs(out, model);
    srv_buf_puts(out, "}");
}

void srv_write_model(srv_buf *out, const srv_model_view *model) {
    srv_buf_puts(out, "{\"id\":");
    srv_json_text(out, model->name);
    srv_buf_puts(out, ",\"object\":\"model\"");
    member_integer(out, "created", model->created);
    srv_buf_puts(out, ",\"owned_by\":\"mesa\"");
    // vLLM's spelling, for clients that size their prompts by it.
    member_length(out, "max_model_len", model->info ? model->info->context_length : -1);
    write_meta(out, model);
    srv_buf_puts(out, "}");
}

static const char *residence_name(eng_residence residence) {
    switch (residence) {
    case ENG_RESIDENCE_DEVICE:
        return "device";
    case ENG_RESIDENCE_HOST:
        return "host";
    case ENG_RESIDENCE_NONE:
        break;
    }
    return NULL;
}

static void write_session_info(srv_buf *out, const eng_timeline_info *info) {
    member_integer(out, "earliest", info->earliest);
    member_text(out, "residence", residence_name(info->residence));
    member_integer(out, "bytes", (int64_t)info->bytes);
    srv_buf_puts(out, ",\"busy\":");
    srv_json_bool(out, info->busy);
    srv_buf_puts(out, ",\"durable\":");
    srv_json_bool(out, info->durable);
    srv_buf_puts(out, ",\"profile_changed\":");
    srv_json_bool(out, info->profile_changed);
    if (!info->has_knobs)
        return;
    srv_buf_puts(out, ",\"loosest\":{\"cg_tolerance\":");
    srv_json_float(out, info->loosest.cg_tolerance);
    member_integer(out, "cg_max_steps", info->loosest.cg_max_steps);
    member_text(out, "cg_mode", mode_name(info->loosest.cg_mode));
    srv_buf_puts(out, "}");
}

static void write_digest(srv_buf *out, const unsigned char *digest) {
    srv_buf_puts(out, ",\"digest\":\"");
    for (size_t i = 0; i < ENG_TIMELINE_DIGEST_BYTES; i++)
        srv_buf_printf(out, "%02x", digest[i]);
    srv_buf_puts(out, "\"");
}

void srv_write_session(srv_buf *out, const srv_session_view *session) {
    srv_buf_puts(out, "{\"id\":");
    srv_json_text(out, session->id);
    srv_buf_puts(out, ",\"object\":\"session\"");
    member_text(out, "model", session->model);
    member_integer(out, "position", session->position);
    member_integer(out, "state_bytes", (int64_t)session->state_bytes);
    member_integer(out, "expires_at", session->expires_at);
    if (session->info)
        write_session_info(out, session->info);
    else if (session->in_store)
        member_text(out, "residence", "store");
    if (session->digest)
        write_digest(out, session->digest);
    srv_buf_puts(out, "}");
}

void srv_write_models(srv_buf *out, const srv_model_view *models, size_t count) {
    srv_buf_puts(out, "{\"object\":\"list\",\"data\":[");
    for (size_t i = 0; i < count; i++) {
        if (i)
            srv_buf_puts(out, ",");
        srv_write_model(out, &models[i]);
    }
    srv_buf_puts(out, "]}");
}

void srv_write_health(srv_buf *out, const char *state, const char *store, const srv_model_view *models, size_t count) {
    srv_buf_puts(out, "{\"status\":");
    srv_json_text(out, state);
    srv_buf_puts(out, ",\"models\":[");
    for (size_t i = 0; i < count; i++) {
        srv_buf_puts(out, i ? ",{\"id\":" : "{\"id\":");
        srv_json_text(out, models[i].name);
        member_text(out, "state", models[i].state);
        member_text(out, "device", models[i].info ? models[i].info->device : NULL);
        srv_buf_puts(out, "}");
    }
    srv_buf_puts(out, "]");
    member_text(out, "store", store);
    srv_buf_puts(out, "}");
}

// ---- tokens --------------------------------------------------------------------------------------------------------

void srv_write_tokens(srv_buf *out, const int32_t *ids, size_t count, int64_t context_length) {
    srv_buf_puts(out, "{\"count\":");
    srv_json_integer(out, (int64_t)count);
    member_length(out, "max_model_len", context_length);
    srv_buf_puts(out, ",\"tokens\":[");
    for (size_t i = 0; i < count; i++) {
        if (i)
            srv_buf_puts(out, ",");
        srv_json_integer(out, ids[i]);
    }
    srv_buf_puts(out, "]}");
}

void srv_write_text(srv_buf *out, const char *text, size_t length) {
    srv_buf_puts(out, "{\"prompt\":");
    srv_json_string(out, text, length);
    srv_buf_puts(out, "}");
}

// The text of a special token; null where the tokenizer has none.
static void member_token(srv_buf *out, const char *name, const eng_engine *engine, int32_t id) {
    size_t length = 0;
    const char *bytes = id < 0 ? "" : eng_token_bytes(engine, id, &length);

    srv_buf_printf(out, ",\"%s\":", name);
    if (length)
        srv_json_string(out, bytes, length);
    else
        srv_buf_puts(out, "null");
}

void srv_write_tokenizer(srv_buf *out, const eng_engine *engine) {
    const eng_model_info *info = eng_info(engine);

    srv_buf_puts(out, "{\"vocab_size\":");
    srv_json_integer(out, info->vocab_size);
    member_token(out, "bos_token", engine, info->bos_id);
    member_length(out, "bos_token_id", info->bos_id);
    member_token(out, "eos_token", engine, info->eos_id);
    member_length(out, "eos_token_id", info->eos_id);
    srv_buf_puts(out, ",\"pad_token\":null,\"add_bos_token\":");
    srv_json_bool(out, info->bos_id >= 0);
    srv_buf_puts(out, ",\"chat_template\":");
    srv_json_text(out, info->chat_template);
    srv_buf_puts(out, "}");
}
