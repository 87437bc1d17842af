// SPDX-License-Identifier: Apache-2.0
// The page's text and style; see report_page.h. One style for every page that `report` makes: a column of text that
// tables may overflow by scrolling in their own boxes, so that a narrow screen never scrolls sideways as a whole; a
// shade at a box's edge says that there is more.
#include "trainer/report_page.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"

static const char style[] =
    ":root{color-scheme:light dark;--paper:#fdfdfb;--card:#fff;--ink:#1c2024;--soft:#5a636d;--line:#dcdfe3;"
    "--good:#0b6e3c;--bad:#a8321f;--head:#f1f3f5;--shade:#0003;"
    "--s0:#0b62a8;--s1:#c2500a;--s2:#0a7d5a;--s3:#9a2f86;--s4:#8a6d00;--s5:#b3261e;--s6:#3a6b8c;--s7:#555b61}"
    "@media(prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1b1f23;--ink:#e6e9ec;--soft:#9aa4ae;--line:#"
    "343a41;"
    "--good:#5fd394;--bad:#ff8f7a;--head:#23282d;--shade:#0009;"
    "--s0:#6bb4ff;--s1:#ffa55c;--s2:#52d3a4;--s3:#e592d6;--s4:#e3c34c;--s5:#ff8a80;--s6:#9cc9e3;--s7:#b4bac0}}"
    "*{box-sizing:border-box}"
    "body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}"
    "main{max-width:1200px;margin:0 auto;padding:1.25rem 1rem 4rem}"
    "h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.2rem;margin:2.25rem 0 .5rem}"
    "h3{font-size:1rem;margin:1rem 0 .25rem}p{max-width:46rem;margin:.4rem 0}.soft{color:var(--soft)}"
    ".wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px;background:"
    "linear-gradient(90deg,var(--card) 40%,transparent) 0 0/40px 100% no-repeat local,"
    "linear-gradient(270deg,var(--card) 40%,transparent) 100% 0/40px 100% no-repeat local,"
    "linear-gradient(90deg,var(--shade),transparent) 0 0/14px 100% no-repeat scroll,"
    "linear-gradient(270deg,var(--shade),transparent) 100% 0/14px 100% no-repeat scroll,var(--card)}"
    "table{border-collapse:separate;border-spacing:0;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}"
    "th,td{padding:.35rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}"
    "thead th{background:var(--head);font-weight:600;vertical-align:bottom}"
    "tbody tr:last-child>*{border-bottom:0}th:first-child,td.name{text-align:left}"
    "tbody th{font-weight:500;position:sticky;left:0;background:var(--card);white-space:normal;min-width:10rem}"
    "thead th:first-child{position:sticky;left:0}"
    "small,.error{color:var(--soft);font-size:.8125rem;font-weight:400}.good{color:var(--good)}.bad{color:var(--bad)}"
    ".plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,29rem),1fr))}"
    "figure{margin:0;padding:.75rem;border:1px solid var(--line);border-radius:6px;background:var(--card)}"
    "figcaption{font-weight:600;font-size:.9375rem;margin-bottom:.25rem}svg{display:block;width:100%;height:auto}"
    "svg text{fill:var(--soft);font:12.5px system-ui,sans-serif}.grid{stroke:var(--line);stroke-width:1}"
    ".axis{stroke:var(--soft);stroke-width:1}.guide{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 4}"
    "ul.key{list-style:none;margin:.4rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.8125rem}"
    ".wide+.plots{margin-top:1rem}figure{position:relative}input.box{position:absolute;opacity:0;width:1px;height:1px;"
    "margin:0;bottom:1rem}"
    "ul.key label{cursor:pointer;display:inline-block;padding:.1rem 0}"
    "ul.key svg{display:inline-block;width:34px;height:12px;vertical-align:middle;margin-right:.35rem}"
    "details{margin:.5rem 0;border:1px solid var(--line);border-radius:6px;background:var(--card)}"
    "summary{cursor:pointer;padding:.5rem .8rem;font-weight:500}details .wide{border:0;border-top:1px solid "
    "var(--line);"
    "border-radius:0}details>p{padding:0 .8rem}"
    "@media(max-width:70rem){.runs th,.runs td{padding:.35rem .5rem}}"
    "@media(max-width:40rem){body{font-size:15px}main{padding:.75rem .75rem 3rem}h1{font-size:1.35rem}"
    "th,td{padding:.3rem .5rem}tbody th{min-width:7rem}svg text{font-size:15px}}"
    "@media print{details{break-inside:avoid}}";

static void put_bytes(trn_page *page, const char *text, size_t length) {
    if (page->failed)
        return;
    if (page->length + length + 1 > page->capacity) {
        size_t capacity = 2 * (page->length + length + 1);
        char *grown = realloc(page->text, capacity);
        if (!grown) {
            page->failed = true;
            return;
        }
        page->text = grown;
        page->capacity = capacity;
    }
    memcpy(page->text + page->length, text, length);
    page->length += length;
    page->text[page->length] = '\0';
}

void trn_page_put(trn_page *page, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof text)
        page->failed = true;
    else
        put_bytes(page, text, (size_t)length);
}

void trn_page_text(trn_page *page, const char *text) {
    for (; *text; text++) {
        const char *escaped = *text == '<'   ? "&lt;"
                              : *text == '>' ? "&gt;"
                              : *text == '&' ? "&amp;"
                              : *text == '"' ? "&quot;"
                                             : NULL;
        put_bytes(page, escaped ? escaped : text, escaped ? strlen(escaped) : 1);
    }
}

// The boxes of a plot's series: all that the legend does.
static void put_boxes(trn_page *page) {
    for (int s = 0; s < TRN_PLOT_CURVES; s++)
        trn_page_put(page,
                     ".b%d:not(:checked)~svg .c%d{display:none}.b%d:not(:checked)~ul .k%d{opacity:.4}"
                     ".b%d:focus-visible~ul .k%d{outline:2px solid}",
                     s, s, s, s, s, s);
}

void trn_page_begin(trn_page *page, const char *title) {
    *page = (trn_page){0};
    trn_page_put(page, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                       "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>");
    trn_page_text(page, title);
    trn_page_put(page, "</title>\n<style>");
    put_bytes(page, style, sizeof style - 1);
    put_boxes(page);
    trn_page_put(page, "</style></head>\n<body><main>\n<h1>");
    trn_page_text(page, title);
    trn_page_put(page, "</h1>\n");
}

void trn_page_drop(trn_page *page, size_t length) {
    page->length = length;
    if (page->text)
        page->text[length] = '\0';
}

void trn_page_free(trn_page *page) {
    free(page->text);
    *page = (trn_page){0};
}

eng_status trn_page_write(trn_page *page, const char *path, eng_error *error) {
    trn_page_put(page, "</main></body></html>\n");
    eng_status status = page->failed ? eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for the page", path)
                                     : eng_write_file_atomic(path, page->text, page->length, error);
    trn_page_free(page);
    return status;
}
