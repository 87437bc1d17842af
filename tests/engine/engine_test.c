// SPDX-License-Identifier: Apache-2.0
// The door: opening, requests from submission to their last event, refusals, and numbers gone wrong.
//
// Greedy answers of a random model serve as their own oracle: stop strings and end-of-text ids are chosen from what the
// model says without them.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { POISON = 7, HUGE_CHANNEL = 5 };

// ------------------------------------------------------------------------------------------------------------ opening

START_TEST(the_model_is_described) {
    eng_engine *engine = open_small(SMALL_HYBRID);
    const eng_model_info *info = eng_info(engine);
    ck_assert(!info->fast && info->prefix_audit == 0);
    ck_assert_str_eq(info->model_type, "mesa_net");
    ck_assert_str_eq(info->mixers, "mesa_net,attention");
    ck_assert_ptr_nonnull(strstr(info->device, test_device("cpu")));
    ck_assert_uint_gt(strlen(info->numeric_profile), 0);
    ck_assert_int_eq(info->layers, 3);
    ck_assert_int_eq(info->loops, 1);
    ck_assert_int_eq(info->vocab_size, SMALL_VOCAB);
    ck_assert_int_eq(info->context_length, -1); // a window is no bound
    ck_assert_uint_eq(info->kv_bytes_per_token, 0);
    ck_assert_uint_ge(info->state_bytes, 2 * 2 * 2 * 32 * 32 * sizeof(float));
    ck_assert(info->has_tokenizer && info->has_mesa && !info->has_loops);
    ck_assert_int_eq(info->max_rows, 8);
    ck_assert_int_eq(info->bos_id, -1);
    ck_assert_uint_ge(info->pool_bytes, 8 * info->state_bytes);
    ck_assert_uint_ge(info->weight_bytes, 4 * info->parameters);
    eng_close(engine);
    for (int fast = 0; fast < 2; fast++) {
        engine = open_with(SMALL_MESA, (eng_options){.fast = fast, .prefix_audit = 9});
        ck_assert(eng_info(engine)->fast == fast && eng_info(engine)->prefix_audit == (fast ? 0 : 9));
        eng_close(engine);
    }
    engine = open_with(SMALL_LLAMA, (eng_options){0});
    info = eng_info(engine);
    ck_assert_str_eq(info->mixers, "attention");
    ck_assert_int_eq(info->context_length, SMALL_CONTEXT);
    ck_assert_uint_eq(info->kv_bytes_per_token, 2 * 2 * 2 * 16 * sizeof(float));
    ck_assert_int_ge(info->max_rows, 32);
    ck_assert(!info->has_mesa);
    ck_assert_uint_eq(gauges_of(engine).kv_pages_total, (1 << 16) / 64);
    eng_close(engine);
    eng_close(NULL);
}
END_TEST

static void refuse_open(eng_options options, eng_status want, const char *naming) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_open(&options, &engine, &error), want);
    ck_assert_ptr_null(engine);
    ck_assert_msg(strstr(error.text, naming) != NULL, "'%s' lacks '%s'", error.text, naming);
}

START_TEST(what_cannot_be_opened_is_named) {
    char good[512], bare[512];
    snprintf(good, sizeof good, "%s", temp_path("good"));
    snprintf(bare, sizeof bare, "%s", temp_path("bare"));
    small_checkpoint(good, &small_models[SMALL_MESA], NULL, true);
    small_checkpoint(bare, &small_models[SMALL_MESA], NULL, false);
    refuse_open((eng_options){.device = "cpu"}, ENG_INVALID, "model_dir");
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .max_rows = -1}, ENG_INVALID, "max_rows");
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .max_rows = 1000000}, ENG_INVALID, "max_rows");
    refuse_open((eng_options){.model_dir = good, .device = "abacus"}, ENG_INVALID, "abacus");
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .state_budget = 1000}, ENG_INVALID, "state_budget");
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .state_storage = ENG_STATE_BF16}, ENG_INVALID,
                "state_storage bf16 needs a CUDA device");
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .prompt_tokens = -1}, ENG_INVALID, "prompt_tokens");
    refuse_open((eng_options){.model_dir = temp_path("none"), .device = "cpu"}, ENG_NOT_FOUND, "none");
    refuse_open((eng_options){.model_dir = bare, .device = "cpu", .need_tokenizer = true}, ENG_NOT_FOUND,
                "tokenizer.json");
}
END_TEST

static eng_fingerprint fingerprint_of(const char *folder) {
    eng_fingerprint out;
    eng_error error = {0};
    ck_assert_msg(eng_read_fingerprint(folder, &out, &error) == ENG_OK, "%s", error.text);
    return out;
}

// What an engine tells of its folder is what is read of the folder alone; each kind of file moves its own digest.
START_TEST(a_folder_has_a_fingerprint) {
    char good[512];
    eng_engine *engine = NULL;
    eng_error error = {0};
    snprintf(good, sizeof good, "%s", temp_path("good"));
    small_checkpoint(good, &small_models[SMALL_MESA], NULL, true);
    const eng_fingerprint first = fingerprint_of(good);
    ck_assert_uint_eq(strlen(first.states), ENG_FINGERPRINT_BYTES - 1);
    ck_assert_str_ne(first.states, first.whole);
    ck_assert_int_eq(eng_open(&(eng_options){.model_dir = good, .device = "cpu"}, &engine, &error), ENG_OK);
    ck_assert_str_eq(eng_info(engine)->fingerprint.states, first.states);
    ck_assert_str_eq(eng_info(engine)->fingerprint.whole, first.whole);
    eng_close(engine);
    temp_write("good/chat_template.jinja", "hello", 5);
    const eng_fingerprint talking = fingerprint_of(good);
    ck_assert_str_eq(talking.states, first.states);
    ck_assert_str_ne(talking.whole, first.whole);
    small_checkpoint(good, &small_models[SMALL_MESA], speak_letters, true);
    const eng_fingerprint other = fingerprint_of(good);
    ck_assert_str_ne(other.states, first.states);
    ck_assert_str_ne(other.whole, first.whole);
    ck_assert_int_eq(eng_read_fingerprint(temp_path("none"), &(eng_fingerprint){.states = ""}, &error), ENG_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.text, "none"));
}
END_TEST

START_TEST(a_limit_of_memory_is_kept) {
    char good[512];
    snprintf(good, sizeof good, "%s", temp_path("good"));
    small_checkpoint(good, &small_models[SMALL_LLAMA], NULL, true);
    refuse_open((eng_options){.model_dir = good, .device = "cpu", .memory_limit = 20000000}, ENG_NO_MEMORY,
                "cpu has 19.1 of ");
}
END_TEST

// Lets "cuda:0" be the module that pretends.
static bool pretend(void) {
    static const char folder[] = MESA_BINARY_DIR "/tests/device";
    setenv("MESA_LIBRARY_DIR", folder, 1);
    return access(folder, R_OK) == 0;
}

static void open_and_close(eng_options options, const char *memory) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    setenv("PRETEND_MEMORY", memory, 1);
    ck_assert_msg(eng_open(&options, &engine, &error) == ENG_OK, "%s", error.text);
    eng_close(engine);
}

START_TEST(what_a_device_lacks_is_named) {
    char good[512];
    eng_engine *engine = NULL;
    if (!pretend())
        MESA_TEST_SKIP("no module that pretends");
    snprintf(good, sizeof good, "%s", temp_path("good"));
    small_checkpoint(good, &small_models[SMALL_LLAMA], NULL, true);
    eng_options options = {.model_dir = good, .device = "cuda:0", .max_rows = 16};
    refuse_open((eng_options){.model_dir = good, .device = "cuda:7"}, ENG_DEVICE, "this host has 2 CUDA devices");
    setenv("PRETEND_MEMORY", "20000000", 1);
    refuse_open(options, ENG_NO_MEMORY, "cuda:0 has 19.1 of 19.1 MiB free; ");
    refuse_open(options, ENG_NO_MEMORY, " are needed: weights 0.4, 16 states 0.0, 1024 KV pages 32.0, activations ");
    open_and_close(options, "34900000");  // 33.28 MiB: what was named is enough
    options.state_budget = 16 * 64 * 512; // 16 pages
    open_and_close(options, "20000000");
    setenv("PRETEND_REFUSAL", "cuda:0 (old) has compute capability 7.5; at least 8.0 is needed", 1);
    refuse_open(options, ENG_DEVICE, "device cuda:0: cuda:0 (old) has compute capability 7.5");
    options.device = "auto"; // falls back, and says why in the log
    ck_assert_int_eq(eng_open(&options, &engine, NULL), ENG_OK);
    ck_assert_ptr_nonnull(strstr(eng_info(engine)->device, "cpu ("));
    eng_close(engine);
    setenv("MESA_LIBRARY_DIR", temp_path("empty"), 1);
    options.device = "cuda:0";
    refuse_open(options, ENG_DEVICE, "no CUDA module");
}
END_TEST

START_TEST(a_lost_device_ends_the_engine) {
    static outcome out;
    eng_error error = {0};
    bool worked;
    if (!pretend())
        MESA_TEST_SKIP("no module that pretends");
    setenv("MESA_TEST_DEVICE", "cuda:0", 1);
    setenv("PRETEND_LOST", temp_path("lost"), 1);
    eng_engine *engine = open_small(SMALL_MESA);
    submit(engine, greedy(engine, (int32_t[]){1, 2}, 2, 50), &out);
    for (int i = 0; i < 5; i++)
        ck_assert(step(engine));
    temp_write("lost", "", 0);
    for (int i = 0; i < 2; i++) { // it stays so
        error = (eng_error){0};
        ck_assert_int_eq(eng_step(engine, NULL, NULL, &worked, &error), ENG_DEVICE);
        ck_assert_ptr_nonnull(strstr(error.text, "device lost"));
        unlink(temp_path("lost"));
    }
    ck_assert_int_eq(out.finals, 0);
    eng_close(engine);
}
END_TEST

START_TEST(a_spoiled_weight_is_refused) {
    char path[600];
    small_checkpoint(temp_path("spoiled"), &small_models[SMALL_MESA], NULL, true);
    snprintf(path, sizeof path, "%s/model.safetensors", temp_path("spoiled"));
    FILE *file = fopen(path, "r+b");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fseek(file, -4, SEEK_END), 0);
    ck_assert_uint_eq(fwrite("\0\0\xC0\x7F", 1, 4, file), 4); // NaN
    ck_assert_int_eq(fclose(file), 0);
    refuse_open((eng_options){.model_dir = temp_path("spoiled"), .device = "cpu"}, ENG_NUMERIC, "not finite");
}
END_TEST

START_TEST(a_budget_bounds_the_pool) {
    eng_engine *engine = open_small(SMALL_MESA);
    uint64_t state = eng_info(engine)->state_bytes;
    eng_close(engine);
    engine = open_with(SMALL_MESA, (eng_options){.max_rows = 8, .state_budget = 3 * state + state / 2});
    ck_assert_int_eq(eng_info(engine)->max_rows, 3);
    ck_assert_uint_le(eng_info(engine)->pool_bytes, 3 * state + state / 2);
    ck_assert_uint_eq(gauges_of(engine).states_total, 3);
    eng_close(engine);
}
END_TEST

// Tokens that wait for two of three loops, 64 vectors of 64 floats each, and how many they are, have their room beside
// every state.
START_TEST(a_budget_holds_what_waits) {
    eng_engine *engine = open_small(SMALL_LOOPED);
    const uint64_t waiting = 2 * 64 * 64 * 4 + 192, page = 3 * 64 * 2 * 2 * 16 * 4,
                   state = eng_info(engine)->state_bytes;
    const uint64_t budget = 3 * ((state + 63) / 64 * 64 + waiting + page);
    eng_close(engine);
    for (int less = 0; less < 2; less++) {
        engine = open_with(SMALL_LOOPED, (eng_options){.max_rows = 8, .state_budget = budget - (uint64_t)less});
        ck_assert_int_eq(eng_info(engine)->max_rows, 3 - less);
        ck_assert_uint_ge(eng_info(engine)->pool_bytes, (uint64_t)(3 - less) * (state + waiting));
        ck_assert_uint_le(eng_info(engine)->pool_bytes, budget);
        eng_close(engine);
    }
}
END_TEST

START_TEST(text_and_ids) {
    eng_engine *engine = open_small(SMALL_MESA), *bare = NULL;
    int32_t *ids;
    size_t count, length;
    char *text;
    ck_assert_int_eq(eng_encode(engine, "hi</s>\xC3\xA9", 8, true, &ids, &count, NULL), ENG_OK);
    ck_assert_uint_eq(count, 5);
    ck_assert_mem_eq(ids, ((int32_t[]){'h', 'i', SMALL_EOS, 0xC3, 0xA9}), 5 * sizeof *ids);
    ck_assert_int_eq(eng_decode(engine, ids, count, false, &text, &length, NULL), ENG_OK);
    ck_assert_str_eq(text, "hi\xC3\xA9");
    eng_free(text);
    eng_free(ids);
    ck_assert_int_eq(eng_encode(engine, "\xFF", 1, true, &ids, &count, NULL), ENG_INVALID);
    ck_assert_int_eq(eng_decode(engine, (int32_t[]){SMALL_VOCAB}, 1, false, &text, &length, NULL), ENG_INVALID);
    ck_assert_int_eq(*eng_token_bytes(engine, 0xC3, &length), '\xC3'); // a part of a character
    ck_assert_uint_eq(length, 1);
    ck_assert(memcmp(eng_token_bytes(engine, SMALL_EOS, &length), "</s>", 4) == 0);
    ck_assert_uint_eq(length, 4);
    (void)eng_token_bytes(engine, SMALL_VOCAB - 1, &length); // a row of the model without a token
    ck_assert_uint_eq(length, 0);
    (void)eng_token_bytes(engine, -1, &length);
    ck_assert_uint_eq(length, 0);
    eng_close(engine);

    small_checkpoint(temp_path("bare"), &small_models[SMALL_MESA], speak_letters, false);
    eng_options options = {.model_dir = temp_path("bare"), .device = test_device("cpu"), .max_rows = 2};
    ck_assert_int_eq(eng_open(&options, &bare, NULL), ENG_OK);
    ck_assert(!eng_info(bare)->has_tokenizer);
    (void)eng_token_bytes(bare, 'a', &length);
    ck_assert_uint_eq(length, 0);
    ck_assert_int_eq(eng_encode(bare, "a", 1, true, &ids, &count, NULL), ENG_UNSUPPORTED);
    eng_request request = greedy(bare, (int32_t[]){1, 2}, 2, 5);
    outcome out = answer(bare, request);
    ck_assert_uint_eq(out.id_count, 5); // ids come without text
    ck_assert_uint_eq(out.text_length, 0);
    uint64_t id;
    request.stops = &(eng_text){"a", 1};
    request.stop_count = 1;
    ck_assert_int_eq(eng_submit(bare, &request, &id, NULL), ENG_UNSUPPORTED);
    eng_close(bare);
}
END_TEST

// --------------------------------------------------------------------------------------------------------- generation

START_TEST(a_request_runs_to_its_length) {
    eng_engine *engine = open_small(_i);
    int32_t prompt[50];
    small_prompt(5, prompt, 50);
    uint64_t allocations = gauges_of(engine).device_allocations;
    outcome out = answer(engine, greedy(engine, prompt, 50, 20));
    ck_assert_int_eq(out.finish, ENG_FINISH_LENGTH);
    ck_assert_int_eq(out.usage.prompt_tokens, 50);
    ck_assert_int_eq(out.usage.completion_tokens, 20);
    ck_assert_int_eq(out.usage.cached_tokens, 0);
    ck_assert_uint_eq(out.text_length, 20);
    for (int i = 0; i < 20; i++) {
        ck_assert_int_eq(out.text[i], out.ids[i]);
        ck_assert(out.text[i] >= 'a' && out.text[i] <= 'z');
    }
    uint64_t solves = _i == SMALL_LOOPED ? 4 * 2 : small_models[_i].mesa ? 2 * 2 : 0; // Mesa layers of two heads
    ck_assert_uint_eq(out.usage.prompt.solves, 50 * solves);
    if (_i == SMALL_LOOPED) // what leaves early leaves solves for later, on a CPU at least
        ck_assert(out.usage.completion.solves <= 19 * solves - test_device_is_cpu() &&
                  out.usage.completion.solves >= 19 * solves / 4);
    else
        ck_assert_uint_eq(out.usage.completion.solves, 19 * solves); // the last id is never read
    ck_assert(out.usage.prompt.steps <= (uint64_t)out.usage.prompt.steps_max * out.usage.prompt.solves);
    outcome again = answer(engine, greedy(engine, prompt, 50, 20));
    ck_assert_str_eq(again.text, out.text);
    ck_assert_uint_gt(again.id, out.id);
    ck_assert_uint_eq(gauges_of(engine).device_allocations, allocations);
    ck_assert(!step(engine)); // nothing is left to do
    eng_close(engine);
}
END_TEST

START_TEST(alone_equals_among_others_in_any_order) {
    static outcome among[20], reversed[20];
    int32_t prompt[20][80];
    eng_request request[20];
    eng_engine *engine = open_small(_i);
    for (int i = 0; i < 20; i++) {
        size_t count = 1 + (size_t)(i * 37) % 80;
        small_prompt((uint64_t)i, prompt[i], 80);
        request[i] = greedy(engine, prompt[i], count, 3 + i % 7);
        request[i].sampling = (eng_sampling){
            .temperature = (float)(i % 3), .top_p = 0.95F, .seed = (uint64_t)i, .choice = (uint32_t)i % 2};
        submit(engine, request[i], &among[i]);
    }
    drain(engine);
    for (int i = 20; i-- > 0;)
        submit(engine, request[i], &reversed[i]);
    drain(engine);
    for (int i = 0; i < 20; i++) {
        outcome alone = answer(engine, request[i]);
        ck_assert_uint_eq(alone.id_count, among[i].id_count);
        ck_assert_mem_eq(alone.ids, among[i].ids, sizeof *alone.ids * alone.id_count);
        ck_assert_mem_eq(alone.ids, reversed[i].ids, sizeof *alone.ids * alone.id_count);
        ck_assert_mem_eq(&alone.usage, &among[i].usage, sizeof alone.usage);
    }
    eng_close(engine);
}
END_TEST

// One of many that differ in everything a request may choose; prompt has room for it.
static eng_request mixed(const eng_engine *engine, int which, int32_t prompt[150]) {
    static const eng_knobs knobs[] = {{ENG_CG_TOLERANCE, 1e-4F, 30, 1, 1},
                                      {ENG_CG_TOLERANCE, 1e-2F, 200, 1, 1},
                                      {ENG_CG_STEPS, 0, 7, 1, 1},
                                      {ENG_CG_EXACT, 0, 0, 1, 1}};
    small_prompt((uint64_t)which, prompt, 150);
    eng_request request = greedy(engine, prompt, 1 + (size_t)(which * 37) % 150, 3 + which % 9);
    request.knobs = knobs[which % 4];
    request.sampling = (eng_sampling){.temperature = (float)(which % 3),
                                      .top_p = which % 5 ? 0.9F : 1,
                                      .min_p = which % 7 ? 0 : 0.02F,
                                      .top_k = which % 6 ? 0 : 5,
                                      .seed = (uint64_t)which};
    request.frequency_penalty = which % 8 ? 0 : 0.5F;
    request.repetition_penalty = which % 11 ? 1 : 1.2F;
    request.logprobs = which % 4;
    return request;
}

// As many as the device serves at once: what is new, what reads and what generates stand in the same steps.
START_TEST(alone_equals_among_a_full_batch) {
    enum { CPU_ROWS = 32, ROWS = 256, ALONE = 9 };
    static outcome among[ROWS];
    static int32_t prompt[ROWS][150];
    int rows = test_device_is_cpu() ? CPU_ROWS : ROWS;
    eng_engine *engine = open_with(_i, (eng_options){.max_rows = rows, .queue_requests = ROWS});
    uint64_t allocations = gauges_of(engine).device_allocations;
    for (int i = 0; i < rows; i++)
        submit(engine, mixed(engine, i, prompt[i]), &among[i]);
    drain(engine);
    for (int i = 0; i < rows; i += rows / ALONE) {
        outcome alone = answer(engine, mixed(engine, i, prompt[i]));
        ck_assert_uint_eq(alone.id_count, among[i].id_count);
        ck_assert_mem_eq(alone.ids, among[i].ids, sizeof *alone.ids * alone.id_count);
        ck_assert_mem_eq(alone.logprobs, among[i].logprobs, sizeof *alone.logprobs * alone.id_count);
        ck_assert_mem_eq(&alone.usage, &among[i].usage, sizeof alone.usage);
    }
    ck_assert_uint_eq(gauges_of(engine).device_allocations, allocations);
    eng_close(engine);
}
END_TEST

START_TEST(no_tokens_wanted) {
    eng_engine *engine = open_small(SMALL_MESA);
    int32_t prompt[100];
    small_prompt(5, prompt, 100);
    outcome out = answer(engine, greedy(engine, prompt, 100, 0));
    ck_assert_int_eq(out.finish, ENG_FINISH_LENGTH);
    ck_assert_uint_eq(out.id_count + out.text_length, 0);
    ck_assert_int_eq(out.usage.prompt_tokens, 100);
    ck_assert_uint_eq(out.usage.prompt.solves, 400);
    ck_assert_uint_eq(out.usage.completion.solves, 0);
    eng_close(engine);
}
END_TEST

// The id that comes at `place` of the greedy answer and not before becomes the end-of-text id of a second folder.
START_TEST(an_end_of_text_id_ends_it) {
    int32_t prompt[30];
    char config[1024];
    small_prompt(8, prompt, 30);
    eng_engine *engine = open_small(SMALL_MESA);
    outcome free_run = answer(engine, greedy(engine, prompt, 30, 40));
    eng_close(engine);
    size_t place = 39;
    while (memchr(free_run.text, free_run.text[place], place))
        place--;
    ck_assert_uint_gt(place, 1);
    const char *key = strstr(small_models[SMALL_MESA].config, "\"eos_token_id\": 257");
    ck_assert_ptr_nonnull(key);
    snprintf(config, sizeof config, "%.*s\"eos_token_id\": [257, %d]%s", (int)(key - small_models[SMALL_MESA].config),
             small_models[SMALL_MESA].config, free_run.ids[place], key + strlen("\"eos_token_id\": 257"));
    small_model ending = small_models[SMALL_MESA];
    ending.config = config;
    small_checkpoint(temp_path("ending"), &ending, speak_letters, true);
    eng_options options = {.model_dir = temp_path("ending"), .device = test_device("cpu"), .max_rows = 2};
    ck_assert_int_eq(eng_open(&options, &engine, NULL), ENG_OK);
    outcome out = answer(engine, greedy(engine, prompt, 30, 40));
    ck_assert_int_eq(out.finish, ENG_FINISH_STOP);
    ck_assert_int_eq(out.usage.completion_tokens, (int64_t)place + 1); // the end-of-text id is counted
    ck_assert_int_eq(out.ids[place], free_run.ids[place]);             // and told
    ck_assert_uint_eq(out.text_length, place);                         // and is no text
    ck_assert_mem_eq(out.text, free_run.text, place);
    out = answer(engine, greedy(engine, prompt, 30, (int64_t)place + 1));
    ck_assert_int_eq(out.finish, ENG_FINISH_STOP); // also when it is the last that was allowed
    eng_close(engine);
}
END_TEST

START_TEST(stop_strings_end_it_before_them) {
    int32_t prompt[30];
    char longer[8];
    small_prompt(9, prompt, 30);
    eng_engine *engine = open_small(SMALL_MESA);
    outcome whole = answer(engine, greedy(engine, prompt, 30, 30));
    eng_request request = greedy(engine, prompt, 30, 30);

    eng_text stops[2] = {{whole.text + 10, 3}, {"never", 5}};
    size_t at = (size_t)(strstr(whole.text, (char[]){whole.text[10], whole.text[11], whole.text[12], 0}) - whole.text);
    request.stops = stops;
    request.stop_count = 2;
    outcome out = answer(engine, request);
    ck_assert_int_eq(out.finish, ENG_FINISH_STOP);
    ck_assert_uint_eq(out.text_length, at);
    ck_assert_mem_eq(out.text, whole.text, at);
    ck_assert_uint_eq(out.id_count, at + 3); // the ids of the stop string were drawn

    snprintf(longer, sizeof longer, "%.2sZZ", whole.text + 28); // begins where the text ends, and never completes
    stops[0] = (eng_text){longer, 4};
    out = answer(engine, request);
    ck_assert_int_eq(out.finish, ENG_FINISH_LENGTH);
    ck_assert_str_eq(out.text, whole.text); // what was held back came out

    char beginnings[2]
                   [4]; // two strings that overlap: what one of them holds back comes out while the other still holds
    for (int i = 0; i < 2; i++) {
        snprintf(beginnings[i], sizeof beginnings[i], "%.2sZ", whole.text + 10 + i);
        stops[i] = (eng_text){beginnings[i], 3};
    }
    out = answer(engine, request);
    ck_assert_str_eq(out.text, whole.text);
    ck_assert_mem_eq(out.ids, whole.ids, 30 * sizeof *out.ids);
    eng_close(engine);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- refusals

START_TEST(bad_requests_are_refused_by_name) {
    eng_engine *engine = open_small(SMALL_LLAMA);
    static int32_t prompt[SMALL_CONTEXT + 1];
    eng_request good = greedy(engine, prompt, 10, 5), bad = good;
#define REFUSE(change, want, naming)       \
    do {                                   \
        bad = good;                        \
        bad.change;                        \
        refuse(engine, bad, want, naming); \
    } while (0)
    REFUSE(count = 0, ENG_INVALID, "prompt");
    REFUSE(max_tokens = -1, ENG_INVALID, "max_tokens");
    REFUSE(sampling.temperature = -1, ENG_INVALID, "temperature");
    REFUSE(sampling.temperature = INFINITY, ENG_INVALID, "temperature");
    REFUSE(sampling.top_p = NAN, ENG_INVALID, "top_p");
    REFUSE(sampling.top_p = 1.01F, ENG_INVALID, "top_p");
    REFUSE(sampling.min_p = -0.1F, ENG_INVALID, "min_p");
    REFUSE(sampling.top_k = -2, ENG_INVALID, "top_k");
    REFUSE(knobs.cg_mode = ENG_CG_FIXED, ENG_INVALID, "cg_mode");
    REFUSE(knobs.cg_tolerance = NAN, ENG_INVALID, "cg_tolerance");
    REFUSE(knobs.cg_max_steps = 257, ENG_INVALID, "cg_max_steps");
    REFUSE(knobs.exit_threshold = 2, ENG_INVALID, "exit_threshold");
    REFUSE(knobs.max_loops = 0, ENG_INVALID, "max_loops");
    REFUSE(max_tokens = SMALL_CONTEXT - 9, ENG_TOO_LONG, "2048");
    REFUSE(max_tokens = INT64_MAX, ENG_TOO_LONG, "2048");
    REFUSE(count = SMALL_CONTEXT + 1, ENG_TOO_LONG, "2049");
#undef REFUSE
    eng_text stops[] = {{"a", 1}, {"", 0}};
    good.stops = stops;
    good.stop_count = 2;
    refuse(engine, good, ENG_INVALID, "stop string 1");
    stops[1] = (eng_text){"\xE2\x82", 2};
    refuse(engine, good, ENG_INVALID, "UTF-8");
    good.stop_count = 0;
    prompt[3] = SMALL_VOCAB;
    refuse(engine, good, ENG_INVALID, "index 3");
    prompt[3] = -1;
    refuse(engine, good, ENG_INVALID, "index 3");
    prompt[3] = 0;
    good.max_tokens = SMALL_CONTEXT - 10; // exactly the context
    uint64_t id;
    ck_assert_int_eq(eng_submit(engine, &good, &id, NULL), ENG_OK);
    ck_assert_uint_eq(gauges_of(engine).queued_requests, 1);
    eng_cancel(engine, id);
    eng_close(engine);
}
END_TEST

// ------------------------------------------------------------------------------------------------- numbers gone wrong

// Only the embedding of POISON has a part in HUGE_CHANNEL, which the first MLP multiplies beyond float32's range.
static void poison(small_world *world) {
    int32_t width = world->model->config.hidden_size, inner = world->model->config.intermediate_size;
    float *embed = small_tensor(world, "model.embeddings.weight"),
          *out = small_tensor(world, "model.layers.0.attn.o_proj.weight");
    float *gate = small_tensor(world, "model.layers.0.mlp.gate_proj.weight");
    float *up = small_tensor(world, "model.layers.0.mlp.up_proj.weight");
    speak_letters(world);
    for (int32_t id = 0; id < SMALL_VOCAB; id++)
        embed[id * width + HUGE_CHANNEL] = id == POISON ? 100 : 0;
    memset(out + HUGE_CHANNEL * 2 * 32, 0, 2 * 32 * sizeof *out);
    for (int32_t i = 0; i < inner; i++)
        gate[i * width + HUGE_CHANNEL] = up[i * width + HUGE_CHANNEL] = 1e30F;
}

START_TEST(non_finite_logits_end_that_request_alone) {
    static outcome sick[3], well;
    int32_t prompt[90], poisoned[90];
    small_prompt(2, prompt, 90);
    for (int i = 0; i < 90; i++)
        prompt[i] = prompt[i] == POISON ? POISON + 1 : prompt[i];
    memcpy(poisoned, prompt, sizeof prompt);
    poisoned[40] = POISON;
    small_checkpoint(temp_path("poison"), &small_models[SMALL_MESA], poison, true);
    eng_options options = {.model_dir = temp_path("poison"), .device = test_device("cpu"), .max_rows = 4};
    eng_engine *engine = NULL;
    ck_assert_int_eq(eng_open(&options, &engine, NULL), ENG_OK);
    outcome want = answer(engine, greedy(engine, prompt, 90, 10));
    ck_assert_int_eq(want.finish, ENG_FINISH_LENGTH);
    submit(engine, greedy(engine, poisoned, 90, 10), &sick[0]);
    submit(engine, greedy(engine, prompt, 90, 10), &well);
    submit(engine, greedy(engine, poisoned, 41, 10), &sick[1]);
    submit(engine, greedy(engine, poisoned, 90, 0), &sick[2]); // reading alone is checked too
    drain(engine);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(sick[i].finish, ENG_FINISH_ERROR);
        ck_assert_int_eq(sick[i].status, ENG_NUMERIC);
        ck_assert_uint_gt(strlen(sick[i].message), 0);
        ck_assert_uint_eq(sick[i].id_count, 0);
    }
    ck_assert_str_eq(well.text, want.text);
    for (int i = 0; i < 4; i++) // the slots that were spoiled serve again
        ck_assert_str_eq(answer(engine, greedy(engine, prompt, 90, 10)).text, want.text);
    eng_close(engine);
}
END_TEST

START_TEST(an_unconverged_solve_may_end_it) {
    int32_t prompt[60];
    small_prompt(2, prompt, 60);
    eng_engine *engine = open_small(SMALL_MESA);
    eng_request request = greedy(engine, prompt, 60, 10);
    request.knobs = (eng_knobs){ENG_CG_TOLERANCE, 1e-7F, 1, 1, 1};
    outcome out = answer(engine, request);
    ck_assert_int_eq(out.finish, ENG_FINISH_LENGTH);
    ck_assert_uint_gt(out.usage.prompt.unconverged, 0);
    ck_assert_int_eq(out.usage.prompt.steps_max, 1);
    request.fail_unconverged = true;
    out = answer(engine, request);
    ck_assert_int_eq(out.finish, ENG_FINISH_ERROR);
    ck_assert_int_eq(out.status, ENG_UNCONVERGED);
    ck_assert_int_eq(out.usage.completion_tokens, 0);
    request.knobs = (eng_knobs){ENG_CG_EXACT, 0, 0, 1, 1};
    out = answer(engine, request);
    ck_assert_int_eq(out.finish, ENG_FINISH_LENGTH);
    ck_assert_uint_eq(out.usage.prompt.unconverged, 0);
    eng_close(engine);
}
END_TEST

static Suite *engine_suite(void) {
    Suite *suite = suite_create("engine");
    TCase *cases = tcase_create("door");
    tcase_set_timeout(cases, 60);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, the_model_is_described);
    tcase_add_test(cases, what_cannot_be_opened_is_named);
    tcase_add_test(cases, a_folder_has_a_fingerprint);
    tcase_add_test(cases, a_limit_of_memory_is_kept);
    tcase_add_test(cases, what_a_device_lacks_is_named);
    tcase_add_test(cases, a_lost_device_ends_the_engine);
    tcase_add_test(cases, a_spoiled_weight_is_refused);
    tcase_add_test(cases, a_budget_bounds_the_pool);
    tcase_add_test(cases, a_budget_holds_what_waits);
    tcase_add_test(cases, text_and_ids);
    tcase_add_loop_test(cases, a_request_runs_to_its_length, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, alone_equals_among_others_in_any_order, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, alone_equals_among_a_full_batch, 0, SMALL_MODELS);
    tcase_add_test(cases, no_tokens_wanted);
    tcase_add_test(cases, an_end_of_text_id_ends_it);
    tcase_add_test(cases, stop_strings_end_it_before_them);
    tcase_add_test(cases, bad_requests_are_refused_by_name);
    tcase_add_test(cases, non_finite_logits_end_that_request_alone);
    tcase_add_test(cases, an_unconverged_solve_may_end_it);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(engine_suite)
