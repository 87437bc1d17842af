// SPDX-License-Identifier: Apache-2.0
// Chat templates: what transformers renders, what is refused and with what words, bounds, and where bytes came from.
//
// The expected texts were recorded from transformers' own environment over the same messages. Nothing here is a
// template of a model except those of the four families at the end, written down from their published form.
#include "engine/template.h"

#include <string.h>

#include "tests/check_main.h"

static const eng_template_name names[] = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};

#define TEXT(text) \
    { text, sizeof(text) - 1 }

static const eng_chat_message three[] = {
    {TEXT("system"), TEXT("sys")},
    {TEXT("user"), TEXT("  H\303\251llo <|x|> w\302\240")},
    {TEXT("assistant"), TEXT("ans\n")},
};

static eng_status render(const char *template, const eng_chat *chat, eng_buffer *text, eng_buffer *given,
                         eng_error *error) {
    eng_template *compiled;
    eng_status status = eng_template_compile(template, strlen(template), &compiled, error);
    if (status != ENG_OK) {
        ck_assert_ptr_null(compiled);
        return status;
    }
    const eng_template_input input = {chat, names, sizeof names / sizeof *names};
    status = eng_template_run(compiled, &input, text, given, error);
    eng_template_free(compiled);
    return status;
}

static void expect(const char *template, const eng_chat *chat, const char *wanted) {
    eng_buffer text = {0}, given = {0};
    eng_error error = {0};
    eng_status status = render(template, chat, &text, &given, &error);
    ck_assert_msg(status == ENG_OK, "%s: %s", template, error.text);
    ck_assert_uint_eq(text.length, given.length);
    ck_assert_int_eq(eng_buffer_append(&text, "", 1), ENG_OK);
    ck_assert_msg(strcmp(text.bytes, wanted) == 0, "%s:\n%s\nwanted\n%s", template, text.bytes, wanted);
    eng_buffer_free(&text);
    eng_buffer_free(&given);
}

static const eng_chat conversation = {three, 3, true, 1796000400};

static const struct {
    const char *template, *text;
} rendered[] = {
    {"{{ 1+2*3 }}", "7"},
    {"{{ 7//2 }}", "3"},
    {"{{ -7//2 }}", "-4"},
    {"{{ -7%3 }}", "2"},
    {"{{ 7%-3 }}", "-2"},
    {"{{ 2-3-4 }}", "-5"},
    {"{{ \"a\"~1~none~true }}", "a1NoneTrue"},
    {"{{ \"a\" \"b\" }}", "ab"},
    {"{{ 'it\\'s\\n' }}", "it's\n"},
    {"{{ 1<2<3 }}", "True"},
    {"{{ 3>2>5 }}", "False"},
    {"{{ not true or true }}", "True"},
    {"{{ not (true and false) }}", "True"},
    {"{{ none or \"x\" }}", "x"},
    {"{{ \"\" and \"y\" }}", ""},
    {"{{ [1,2,3][-1] }}", "3"},
    {"{{ [1,2,3][::-1]|join(\",\") }}", "3,2,1"},
    {"{{ [1,2,3,4][1:]|join }}", "234"},
    {"{{ [1,2,3,4][:-1]|join(\"-\") }}", "1-2-3"},
    {"{{ [1,2,3,4][::2]|join }}", "13"},
    {"{{ [1,2,3,4][-3:-1]|join }}", "23"},
    {"{{ [1,2,3,4][3:0:-1]|join }}", "432"},
    {"{{ \"h\303\251llo\"[1:3] }}", "\303\251l"},
    {"{{ \"h\303\251llo\"[-1] }}", "o"},
    {"{{ \"h\303\251llo\"|length }}", "5"},
    {"{{ \"abc\"[0] }}", "a"},
    {"{{ messages|length }}", "3"},
    {"{{ messages[0].role }}", "system"},
    {"{{ messages[0]['role'] }}", "system"},
    {"{{ messages[0].get('x','d') }}", "d"},
    {"{{ messages[0].nope }}", ""},
    {"{{ messages[5] is defined }}", "False"},
    {"{{ messages[-1].content|trim }}", "ans"},
    {"{{ messages[1].content|upper }}", "  H\303\211LLO <|X|> W\302\240"},
    {"{{ messages[1].content|lower }}", "  h\303\251llo <|x|> w\302\240"},
    {"{{ messages[1].content|capitalize }}", "  h\303\251llo <|x|> w\302\240"},
    {"{{ messages[1].content.strip() }}", "H\303\251llo <|x|> w"},
    {"{{ messages[1].content.lstrip() }}", "H\303\251llo <|x|> w\302\240"},
    {"{{ messages[1].content.rstrip() }}", "  H\303\251llo <|x|> w"},
    {"{{ \"xxaxx\".strip(\"x\") }}", "a"},
    {"{{ \"xyaxy\".rstrip(\"yx\") }}", "xya"},
    {"{{ \"a,b,,c\".split(\",\")|join(\"|\") }}", "a|b||c"},
    {"{{ \"a,b,c\".split(\",\",1)|join(\"|\") }}", "a|b,c"},
    {"{{ \" a  b \".split()|join(\"|\") }}", "a|b"},
    {"{{ \"abc\".split(\"</t>\")[-1] }}", "abc"},
    {"{{ \"a-b\".replace(\"-\",\"+\") }}", "a+b"},
    {"{{ \"abc\".startswith(\"ab\") }}", "True"},
    {"{{ \"abc\".endswith(\"bc\") and \"abc\".endswith(\"\") }}", "True"},
    {"{{ \"b\" in \"abc\" }}", "True"},
    {"{{ \"z\" not in \"abc\" }}", "True"},
    {"{{ 2 in [1,2] }}", "True"},
    {"{{ \"role\" in messages[0] }}", "True"},
    {"{{ \"x\" in messages[0] }}", "False"},
    {"{{ undefinedvar is defined }}", "False"},
    {"{{ undefinedvar is not defined }}", "True"},
    {"{{ undefinedvar }}", ""},
    {"{{ undefinedvar|default(\"d\") }}", "d"},
    {"{{ \"\"|default(\"d\",true) }}", "d"},
    {"{{ none|default(\"d\") }}", "None"},
    {"{{ x if false else \"z\" }}", "z"},
    {"{{ \"q\" if false }}", ""},
    {"{{ true is true }}", "True"},
    {"{{ 1 is number }}", "True"},
    {"{{ \"a\" is string and [] is iterable and {} is mapping }}", "True"},
    {"{{ \"a\" is sequence }}", "True"},
    {"{{ none is none }}", "True"},
    {"{{ 3 is odd }}", "True"},
    {"{{ 4 is even }}", "True"},
    {"{{ 1 is eq 1 }}", "True"},
    {"{{ \"a\" is in [\"a\"] }}", "True"},
    {"{{ {\"a\":1,\"b\":2}.items()|list|length }}", "2"},
    {"{{ {\"a\":1,\"b\":[1,\"x\\n\\\"\303\251\"]}|tojson }}", "{\"a\": 1, \"b\": [1, \"x\\n\\\"\303\251\"]}"},
    {"{{ {\"a\":{\"b\":[]},\"c\":[1,2]}|tojson(indent=2) }}",
     "{\n  \"a\": {\n    \"b\": []\n  },\n  \"c\": [\n    1,\n    2\n  ]\n}"},
    {"{{ {}|tojson }}", "{}"},
    {"{{ \"</script>&'\"|tojson }}", "\"</script>&'\""},
    {"{{ range(3)|join(\",\") }}", "0,1,2"},
    {"{{ range(1,10,3)|join(\",\") }}", "1,4,7"},
    {"{{ range(5,0,-2)|join(\",\") }}", "5,3,1"},
    {"{{ messages|selectattr(\"role\",\"equalto\",\"user\")|list|length }}", "1"},
    {"{{ messages|rejectattr(\"role\",\"equalto\",\"user\")|map(attribute=\"role\")|join(\",\") }}",
     "system,assistant"},
    {"{{ messages|map(attribute=\"content\")|map(\"trim\")|join(\"|\") }}", "sys|H\303\251llo <|x|> w|ans"},
    {"{{ messages|selectattr(\"nope\")|list|length }}", "0"},
    {"{{ [\"b\",\"A\",\"c\"]|sort|join }}", "Abc"},
    {"{{ {\"b\":1,\"A\":2}|dictsort|length }}", "2"},
    {"{{ [3,1,2]|first ~ [3,1,2]|last }}", "32"},
    {"{{ \"abc\"|reverse|list|join if false else 1 }}", "1"},
    {"{{ (1,2)|length }}", "2"},
    {"{{ (1)|string + \"x\" }}", "1x"},
    {"{{ [[1,2],[3,4]][1][0] }}", "3"},
    {"{{ \"a\" * 0 if false else \"k\" }}", "k"},
    {"{{ - 3 + 1 }}", "-2"},
    {"{{ 1 - -1 }}", "2"},
    {"{{ [1]+[2]==[1,2] }}", "True"},
    {"{{ {\"a\":1}=={\"a\":1} }}", "True"},
    {"{{ \"a\"<\"b\" }}", "True"},
    {"{{ true+1 }}", "2"},
    {"{{ loop is defined }}", "False"},
    {"{{ namespace(a=1).a }}", "1"},
    {"{{ messages|length-1 }}", "2"},
    {"{{ messages|length - 1 == 2 }}", "True"},
    {"{{ not messages }}", "False"},
    {"{{ \"%s\" }}", "%s"},
    {"{{ \"{{\" }}", "{{"},
    {"{{ \"a\" if messages[0].role == \"system\" else \"b\" if true else \"c\" }}", "a"},
    {"{{ messages[0].content is string and not messages[0].content is mapping }}", "True"},
    {"{{ 3|string|length }}", "1"},
    {"{{ bos_token + eos_token }}", "<s></s>"},
    {"{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }} {% endfor %}",
     "1TrueFalse2 2FalseFalse1 3FalseTrue0 "},
    {"{% for m in messages if m.role != 'system' %}{{ loop.index0 }}{{ loop.length }}{{ m.role }};{% else %}none{% "
     "endfor %}",
     "02user;12assistant;"},
    {"{% for m in [] %}x{% else %}empty{% endfor %}", "empty"},
    {"{% set x = 1 %}{% for m in messages %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}", "2221"},
    {"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"},
    {"{% if false %}a{% elif true %}b{% else %}c{% endif %}", "b"},
    {"{% if true %}{% set y = 5 %}{% endif %}{{ y }}", "5"},
    {"  {% if true %}\n    a\n  {% endif %}\nb\n", "    a\nb"},
    {"a\n  {%- if true -%}\n   b\n  {%- endif %}\n\nc", "ab\nc"},
    {"x  {# comment #}\n  {# whole line #}\ny {#- stripped -#}  z", "x  yz"},
    {"{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=system;content=sys;"},
    {"{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% "
     "endfor %}",
     "0134"},
    {"{% macro f(a, b=\"B\") %}[{{ a }}{{ b }}{{ messages|length }}]{% endmacro %}{{ f(1) }}{{ f(\"x\", b=2) }}{{ f() "
     "}}",
     "[1B3][x23][B3]"},
    {"{% set q %}\ntext {{ 1 }}\n{% endset %}({{ q }})", "(text 1\n)"},
    {"\t{% if true %}\tz\t{% endif %}\n\n\n", "\tz\t\n"},
    {"{{ \"a\" -}}   b   {{- \"c\" }}  \n  {{ \"d\" }}\n", "abc  \n  d"},
    {"{%+ if true %} p {%+ endif %}\nq", " p q"},
    {"line\r\n  {% if true %}\r\nx\r\n{% endif %}\r\n", "line\nx\n"},
    {"{% for a in [1,2] %}{% for b in \"xy\" %}{{ a }}{{ b }}{{ loop.index }} {% endfor %}{{ loop.index }}|{% endfor "
     "%}",
     "1x1 1y2 1|2x1 2y2 2|"},
    {"{% macro g() %}{{ loop is defined }}{{ z is defined }}{% endmacro %}{% for z in [1] %}{{ g() }}{% endfor %}",
     "FalseFalse"},
    {"{% generation %}abc{% endgeneration %}", "abc"},
    {"{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}{% if "
     "loop.previtem is defined %}P{% endif %}{% endfor %}",
     "sysuser  H\303\251llo <|x|> w\302\240assistantPans\nP"},
    {"{{ messages[0].content.x }}", ""},
    {"{{ messages.x is defined }}", "False"},
};

START_TEST(renders) {
    expect(rendered[_i].template, &conversation, rendered[_i].text);
}
END_TEST

START_TEST(tells_the_date) {
    expect("{{ strftime_now(\"%Y\") }}{{ strftime_now is defined }}", &conversation, "2026True");
}
END_TEST

// ---- refusals and bounds

static const struct {
    const char *template;
    eng_status status;
    const char *words;
} refused[] = {
    {"{{ raise_exception('only ' + messages[0].role) }}", ENG_INVALID, "only system"},
    {"\n\n{{ 1 + 'a' }}", ENG_UNSUPPORTED, "line 3: an operation on an integer and a text"},
    {"{{ nope.x }}", ENG_UNSUPPORTED, "'nope' is undefined"},
    {"{{ nope() }}", ENG_UNSUPPORTED, "the function 'nope'"},
    {"{{ 'a'.nope() }}", ENG_UNSUPPORTED, "the method 'nope' of a text"},
    {"{{ messages[0].nope() }}", ENG_UNSUPPORTED, "the method 'nope' of a dictionary"},
    {"{{ 'a'|nope }}", ENG_UNSUPPORTED, "the filter 'nope'"},
    {"{{ 'a' is nope }}", ENG_UNSUPPORTED, "the test 'nope'"},
    {"{% include 'x' %}", ENG_UNSUPPORTED, "the tag 'include'"},
    {"{% endif %}", ENG_UNSUPPORTED, "the tag 'endif'"},
    {"{% if true %}", ENG_FORMAT, "the tag 'elif' is missing"},
    {"{% for x in messages %}{% endif %}", ENG_UNSUPPORTED, "the tag 'endif'"},
    {"{% break %}", ENG_FORMAT, "outside a loop"},
    {"{{ 1 ", ENG_FORMAT, "without end"},
    {"{{ 'abc }}", ENG_FORMAT, "closing quote"},
    {"{# abc", ENG_FORMAT, "a comment without end"},
    {"{{ }}", ENG_FORMAT, "an expression is missing"},
    {"{{ 1 2 }}", ENG_FORMAT, "'2' where the tag should end"},
    {"{{ 1.5 }}", ENG_UNSUPPORTED, "whole decimal"},
    {"{{ 99999999999999999999 }}", ENG_UNSUPPORTED, "beyond 2^63"},
    {"{{ 9223372036854775807 + 1 }}", ENG_UNSUPPORTED, "beyond 2^63"},
    {"{{ 1 // 0 }}", ENG_UNSUPPORTED, "division by 0"},
    {"{{ messages }}", ENG_UNSUPPORTED, "a list as text"},
    {"{{ ? }}", ENG_FORMAT, "the character '?'"},
    {"{{ [1, 2 }}", ENG_FORMAT, "']' is missing"},
    {"{% for a, b in messages[0].role %}{% endfor %}", ENG_UNSUPPORTED, "2 names for 1 values"},
    {"{% for x in 3 %}{% endfor %}", ENG_UNSUPPORTED, "an integer has no elements"},
    {"{% set messages.x = 1 %}", ENG_UNSUPPORTED, "no namespace"},
    {"{% macro f() %}{% endmacro %}{{ f + 1 }}", ENG_UNSUPPORTED, "an operation on a macro and an integer"},
    {"{% macro f(a) %}{% endmacro %}{{ f(b=1) }}", ENG_UNSUPPORTED, "the macro 'f'"},
    // bounds
    {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ENG_UNSUPPORTED, "nested deeper"},
    {"{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", ENG_TOO_LONG, "more"},
    {"{{ range(99999999999) }}", ENG_TOO_LONG, "more"},
    {"{% set ns = namespace(t='0123456789') %}{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
     ENG_TOO_LONG, "more"},
    {"{% set ns = namespace(t='0123456789') %}{% for a in range(18) %}{% set ns.t = ns.t + ns.t %}{% endfor %}"
     "{% for a in range(999) %}{{ ns.t }}{% endfor %}",
     ENG_TOO_LONG, "more"},
};

START_TEST(refuses) {
    eng_buffer text = {0}, given = {0};
    eng_error error = {0};
    eng_status status = render(refused[_i].template, &conversation, &text, &given, &error);
    ck_assert_msg(status == refused[_i].status, "%s: %d %s", refused[_i].template, status, error.text);
    ck_assert_msg(strstr(error.text, refused[_i].words) != NULL, "%s: %s", refused[_i].template, error.text);
    eng_buffer_free(&text);
    eng_buffer_free(&given);
}
END_TEST

START_TEST(bounds_nesting) {
    static const char *const parts[][3] = {
        {"{{ ", "(", ""},      {"{{ ", "not ", ""},   {"{{ ", "[", ""},          {"{{ ", "- ", ""},
        {"{{ 1", "+1", " }}"}, {"{{ a", ".a", " }}"}, {"", "{% if true %}", ""}, {"{{ a", " if a else a", ""},
    };
    enum { TIMES = 20000 };
    char *template = malloc(TIMES * 16 + 64);
    strcpy(template, parts[_i][0]);
    size_t at = strlen(template), length = strlen(parts[_i][1]);
    for (int i = 0; i < TIMES; i++, at += length)
        memcpy(template + at, parts[_i][1], length + 1);
    strcpy(template + at, parts[_i][2]);
    eng_buffer text = {0}, given = {0};
    eng_error error = {0};
    ck_assert_int_ne(render(template, &conversation, &text, &given, &error), ENG_OK);
    ck_assert(*error.text);
    eng_buffer_free(&text);
    eng_buffer_free(&given);
    free(template);
}
END_TEST

// A long message costs time and memory in proportion to its length.
START_TEST(long_messages_pass) {
    enum { LENGTH = 4 << 20 };
    char *content = malloc(LENGTH);
    memset(content, 'x', LENGTH);
    const eng_chat_message message = {TEXT("user"), {content, LENGTH}};
    const eng_chat chat = {&message, 1, true, 0};
    eng_buffer text = {0}, given = {0};
    eng_error error = {0};
    eng_status status =
        render("{% for m in messages %}{{ '<a>' + m.content.split('</think>')[-1].lstrip('\\n') | trim + '</a>' }}"
               "{% endfor %}",
               &chat, &text, &given, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    ck_assert_uint_eq(text.length, LENGTH + 7);
    eng_buffer_free(&text);
    eng_buffer_free(&given);
    free(content);
}
END_TEST

// ---- origin

START_TEST(marks_what_came_from_messages) {
    static const char *const templates[] = {
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}",
        "{% for m in messages %}{{ '[' ~ m.content ~ ']' }}{% endfor %}",
        "{% for m in messages %}{% set c = m.content|trim|replace('zz', 'z') %}{{ ['[', c, ']']|join }}{% endfor %}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
        "{% for m in messages %}{% set c %}[{{ m.content }}]{% endset %}{{ c[0] + c[1:] }}{% endfor %}",
        "{% for m in messages %}{{ '[' + m.content.split(',')|join(',') + ']' }}{% endfor %}",
    };
    const eng_chat_message message = {TEXT("user"), TEXT("a,[b],\303\251")};
    const eng_chat chat = {&message, 1, true, 0};
    eng_buffer text = {0}, given = {0};
    eng_error error = {0};
    ck_assert_msg(render(templates[_i], &chat, &text, &given, &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_eq(text.length, 10);
    ck_assert_mem_eq(text.bytes, "[a,[b],\303\251]", 10);
    for (size_t i = 0; i < given.length; i++) {
        bool separator = _i == 6 && text.bytes[i] == ','; // the template put these back itself
        ck_assert_int_eq(given.bytes[i], i > 0 && i < 9 && !separator);
    }
    eng_buffer_free(&text);
    eng_buffer_free(&given);
}
END_TEST

// ---- families

static const struct {
    const char *family, *template, *text;
} families[] = {
    {"ChatML",
     "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
     "You help.<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
     "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
     "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n"},
    {"Llama 3",
     "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
     "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 "
     "%}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ "
     "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
     "<s><|start_header_id|>system<|end_header_id|>\n\nsys<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
     "hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"},
    {"Zephyr",
     "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + "
     "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
     "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
     "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
     "<|system|>\nsys</s>\n<|user|>\nhi </s>\n<|assistant|>\n"},
    {"Mistral",
     "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content'] %}\n"
     "    {%- set loop_messages = messages[1:] %}\n{%- else %}\n    {%- set loop_messages = messages %}\n"
     "{%- endif %}\n\n{{- bos_token }}\n{%- for message in loop_messages %}\n"
     "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
     "        {{- raise_exception('Roles must alternate') }}\n    {%- endif %}\n"
     "    {%- if message['role'] == 'user' %}\n        {%- if loop.first and system_message is defined %}\n"
     "            {{- ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}\n"
     "        {%- else %}\n            {{- ' [INST] ' + message['content'] + ' [/INST]' }}\n        {%- endif %}\n"
     "    {%- elif message['role'] == 'assistant' %}\n        {{- ' ' + message['content'] + eos_token}}\n"
     "    {%- endif %}\n{%- endfor %}\n",
     "<s> [INST] sys\n\nhi  [/INST]"},
};

START_TEST(renders_families) {
    static const eng_chat_message messages[] = {{TEXT("system"), TEXT("sys")}, {TEXT("user"), TEXT("hi ")}};
    const eng_chat chat = {messages, 2, true, 0};
    expect(families[_i].template, &chat, families[_i].text);
}
END_TEST

#define COUNT(table) (int)(sizeof(table) / sizeof(table)[0])

static Suite *template_suite(void) {
    Suite *suite = suite_create("template");
    TCase *all = tcase_create("all");
    tcase_add_loop_test(all, renders, 0, COUNT(rendered));
    tcase_add_test(all, tells_the_date);
    tcase_add_loop_test(all, refuses, 0, COUNT(refused));
    tcase_add_loop_test(all, bounds_nesting, 0, 8);
    tcase_add_test(all, long_messages_pass);
    tcase_add_loop_test(all, marks_what_came_from_messages, 0, 7);
    tcase_add_loop_test(all, renders_families, 0, COUNT(families));
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(template_suite)
