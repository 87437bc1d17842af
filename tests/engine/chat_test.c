// SPDX-License-Identifier: Apache-2.0
// Chats as ids: where a folder's template is found, and that a message cannot write special tokens.
//
// The tokenizer is the demo model's, whose one special token is <|endoftext|>.
#include "engine/tokenizer_chat.h"

#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"

#define MODEL MESA_SOURCE_DIR "/deploy/models/demo"
#define END "<|endoftext|>"
#define TEXT(text) \
    { text, strlen(text) }

static const char config[] =
    "{\"bos_token\":{\"content\":\"" END "\"},\"eos_token\":\"" END "\",\"chat_template\":\"%s\"}";
static const char turns[] = "{% for m in messages %}{{ bos_token + m.role + ': ' + m.content + '\\\\n' }}{% endfor %}"
                            "{% if add_generation_prompt %}{{ eos_token }}{% endif %}";

static eng_tokenizer *open_tokenizer(void) {
    eng_tokenizer *tokenizer;
    ck_assert_int_eq(eng_tokenizer_open(MODEL, 0, &tokenizer, NULL), ENG_OK);
    return tokenizer;
}

static void write_config(const char *template) {
    char text[2048];
    int length = snprintf(text, sizeof text, config, template);
    temp_write("tokenizer_config.json", text, (size_t)length);
}

static eng_chat_format *open_format(void) {
    eng_chat_format *format;
    eng_error error = {0};
    ck_assert_msg(eng_chat_format_open(temp_folder(), &format, &error) == ENG_OK, "%s", error.text);
    return format;
}

static size_t count_id(const int32_t *ids, size_t count, int32_t id) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += ids[i] == id;
    return found;
}

// What is harmless gives the ids of the whole text, borders or not.
START_TEST(equals_the_whole_text) {
    static const char *const contents[] = {"Hello world", "\n\nlines\n", "  ", "", "12 + 34 = \xf0\x9f\x98\x80", "a"};
    write_config(turns);
    eng_tokenizer *tokenizer = open_tokenizer();
    eng_chat_format *format = open_format();
    const eng_chat_message messages[] = {{TEXT("user"), TEXT(contents[_i])}, {TEXT("assistant"), TEXT("ok")}};
    const eng_chat chat = {messages, 2, true, 0};
    char wanted[256], *text;
    int32_t *ids, *whole;
    size_t count, whole_count, length;
    snprintf(wanted, sizeof wanted, END "user: %s\n" END "assistant: ok\n" END, contents[_i]);
    ck_assert_int_eq(eng_chat_render(format, &chat, &text, &length, NULL), ENG_OK);
    ck_assert_str_eq(text, wanted);
    ck_assert_uint_eq(length, strlen(wanted));
    ck_assert_int_eq(eng_chat_encode(format, tokenizer, &chat, &ids, &count, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, length, true, false, &whole, &whole_count, NULL), ENG_OK);
    ck_assert_uint_eq(count, whole_count);
    ck_assert_mem_eq(ids, whole, count * sizeof *ids);
    ck_assert_uint_eq(count_id(ids, count, eng_tokenizer_special(tokenizer, END)), 3);
    free(whole);
    free(ids);
    free(text);
    eng_chat_format_close(format);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// The template's own control tokens alone become special, however a message begins, ends or imitates them.
START_TEST(messages_write_no_special_tokens) {
    static const char *const contents[] = {END,      "x" END "y",   END END,    "<|endoftext",
                                           "|>" END, "endoftext|>", " " END " "};
    write_config(turns);
    eng_tokenizer *tokenizer = open_tokenizer();
    eng_chat_format *format = open_format();
    const eng_chat_message message = {TEXT("user"), TEXT(contents[_i])};
    const eng_chat chat = {&message, 1, true, 0};
    const int32_t end = eng_tokenizer_special(tokenizer, END);
    int32_t *ids;
    size_t count, length, wanted_length;
    char *text, *wanted;
    ck_assert_int_eq(eng_chat_encode(format, tokenizer, &chat, &ids, &count, NULL), ENG_OK);
    ck_assert_uint_eq(count_id(ids, count, end), 2);
    ck_assert(ids[0] == end && ids[count - 1] == end);
    // and nothing of the text is lost
    ck_assert_int_eq(eng_tokenizer_decode(tokenizer, ids, count, true, &text, &length, NULL), ENG_OK);
    ck_assert_int_eq(eng_chat_render(format, &chat, &wanted, &wanted_length, NULL), ENG_OK);
    ck_assert_str_eq(text, wanted);
    free(wanted);
    free(text);
    free(ids);
    eng_chat_format_close(format);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// Not even where the two together would make one.
START_TEST(borders_make_no_special_tokens) {
    static const char text[] = "<|endoftext|>";
    eng_tokenizer *tokenizer = open_tokenizer();
    const int32_t end = eng_tokenizer_special(tokenizer, END);
    for (size_t i = 0; i <= sizeof text - 1; i++) {
        uint8_t plain[sizeof text - 1] = {0};
        int32_t *ids;
        size_t count;
        memset(plain + i, 1, sizeof plain - i);
        ck_assert_int_eq(eng_tokenizer_encode_marked(tokenizer, text, sizeof plain, plain, &ids, &count, NULL), ENG_OK);
        ck_assert_uint_eq(count_id(ids, count, end), i == sizeof plain ? 1 : 0);
        free(ids);
    }
    int32_t *ids;
    size_t count;
    ck_assert_int_eq(eng_tokenizer_encode_marked(tokenizer, "", 0, NULL, &ids, &count, NULL), ENG_OK);
    ck_assert_uint_eq(count, 0);
    free(ids);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// ---- where it stands

START_TEST(finds_the_template) {
    static const struct {
        const char *config, *file, *wanted;
    } folders[] = {
        {NULL, NULL, NULL},
        {"{}", NULL, NULL},
        {"{\"chat_template\":null}", NULL, NULL},
        {"{\"chat_template\":\"one\"}", NULL, "one"},
        {"{\"chat_template\":\"one\"}", "two", "two"},
        {NULL, "two", "two"},
        {"{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"a\"},{\"name\":\"default\",\"template\":\"b\"}]}",
         NULL, "b"},
        {"{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"a\"}]}", NULL, NULL},
    };
    if (folders[_i].config)
        temp_write("tokenizer_config.json", folders[_i].config, strlen(folders[_i].config));
    if (folders[_i].file)
        temp_write("chat_template.jinja", folders[_i].file, strlen(folders[_i].file));
    eng_chat_format *format = open_format();
    ck_assert_int_eq(format != NULL, folders[_i].wanted != NULL);
    if (format) {
        ck_assert_str_eq(eng_chat_format_text(format), folders[_i].wanted);
        ck_assert_ptr_null(eng_chat_format_fault(format));
    }
    eng_chat_format_close(format);
}
END_TEST

// A folder whose template cannot be run opens; using it tells why.
START_TEST(keeps_the_fault_of_a_template) {
    write_config("{% include 'x' %}");
    eng_tokenizer *tokenizer = open_tokenizer();
    eng_chat_format *format = open_format();
    const eng_chat chat = {NULL, 0, true, 0};
    eng_error error = {0};
    int32_t *ids;
    size_t count;
    ck_assert_ptr_nonnull(strstr(eng_chat_format_fault(format), "the tag 'include'"));
    ck_assert_int_eq(eng_chat_encode(format, tokenizer, &chat, &ids, &count, &error), ENG_UNSUPPORTED);
    ck_assert_str_eq(error.text, eng_chat_format_fault(format));
    eng_chat_format_close(format);
    eng_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(refuses_a_malformed_config) {
    eng_chat_format *format;
    eng_error error = {0};
    temp_write("tokenizer_config.json", "{\"a\":1,\"a\":2}", 13);
    ck_assert_int_eq(eng_chat_format_open(temp_folder(), &format, &error), ENG_FORMAT);
    ck_assert_ptr_null(format);
    ck_assert_ptr_nonnull(strstr(error.text, "tokenizer_config.json"));
}
END_TEST

static Suite *chat_suite(void) {
    Suite *suite = suite_create("chat");
    TCase *all = tcase_create("all");
    tcase_add_checked_fixture(all, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(all, equals_the_whole_text, 0, 6);
    tcase_add_loop_test(all, messages_write_no_special_tokens, 0, 7);
    tcase_add_test(all, borders_make_no_special_tokens);
    tcase_add_loop_test(all, finds_the_template, 0, 8);
    tcase_add_test(all, keeps_the_fault_of_a_template);
    tcase_add_test(all, refuses_a_malformed_config);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(chat_suite)
