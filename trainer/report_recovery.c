// SPDX-License-Identifier: Apache-2.0
// Recovery: how much of a teacher's score above chance a student has; see report_internal.h.
//
// (student - chance) / (teacher - chance), as a mean over the tasks where the teacher is more than three standard
// errors above chance; elsewhere the ratio means nothing. The interval is a paired bootstrap (Efron, 1979): items are
// drawn with replacement, the same ones for both, task by task. The ratio of the scores themselves stands beside it.
#include <math.h>
#include <stdlib.h>

#include "trainer/draw.h"
#include "trainer/report_internal.h"

enum { REPLICATES = 1000 };

static const double TEACHER_ERRORS = 3;

typedef struct pair {
    const trn_metric *student, *teacher;
    double chance;
} pair;

// The two scores of a task, where recovery is defined.
static bool find_pair(const trn_column *student, const trn_column *teacher, const trn_result_row *task, pair *out) {
    const trn_result_row *of_teacher = trn_report_row(teacher, task), *of_student = trn_report_row(student, task);
    if (!of_teacher || !of_student)
        return false;
    *out = (pair){.teacher = trn_result_find(of_teacher, task->primary),
                  .student = trn_result_find(of_student, task->primary)};
    if (!out->teacher || !out->student || !isfinite(out->teacher->chance))
        return false;
    out->chance = out->teacher->chance;
    trn_estimate score = trn_metric_estimate(out->teacher, NULL, NULL, 0);
    return score.mean - out->chance > TEACHER_ERRORS * score.error;
}

static double ratio(double student, double teacher, double chance) {
    return (student - chance) / (teacher - chance);
}

// Recovery over items that are drawn anew. A draw in which the teacher does not surpass chance is NAN.
static double redrawn(const pair *p, uint64_t stream) {
    trn_draw draw = trn_draw_begin(0, stream);
    int64_t items = p->teacher->items;
    double student = 0, teacher = 0;
    for (int64_t i = 0; i < items; i++) {
        uint32_t item = trn_draw_below(&draw, (uint32_t)items);
        student += p->student->value[item];
        teacher += p->teacher->value[item];
    }
    return teacher / (double)items > p->chance ? ratio(student / (double)items, teacher / (double)items, p->chance)
                                               : NAN;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void put_interval(trn_page *page, const pair *pairs, int count) {
    double mean[REPLICATES];
    int kept = 0;
    for (int replicate = 0; replicate < REPLICATES; replicate++) {
        double sum = 0;
        for (int t = 0; t < count; t++)
            sum += redrawn(&pairs[t], (uint64_t)t * REPLICATES + (uint64_t)replicate) / count;
        if (isfinite(sum))
            mean[kept++] = sum;
    }
    if (kept < REPLICATES / 2) {
        trn_page_put(page, "<td>not separable</td>");
        return;
    }
    qsort(mean, (size_t)kept, sizeof *mean, ascending);
    trn_page_put(page, "<td>%.1f to %.1f %%</td>", 100 * mean[(int)(0.025 * kept)], 100 * mean[(int)(0.975 * kept)]);
}

static void put_student(trn_page *page, const trn_column *student, const pair *pairs, int count) {
    double recovery = 0, raw = 0;
    for (int t = 0; t < count; t++) {
        double s = trn_metric_estimate(pairs[t].student, NULL, NULL, 0).mean;
        double of_teacher = trn_metric_estimate(pairs[t].teacher, NULL, NULL, 0).mean;
        recovery += ratio(s, of_teacher, pairs[t].chance) / count;
        raw += s / of_teacher / count;
    }
    trn_page_put(page, "<tr><th>");
    trn_page_text(page, student->name);
    trn_page_put(page, "</th><td>%.1f %%</td>", 100 * recovery);
    put_interval(page, pairs, count);
    trn_page_put(page, "<td>%.1f %%</td><td>%d</td></tr>\n", 100 * raw, count);
}

void trn_report_recovery(trn_page *page, const trn_report *report) {
    pair *pairs = calloc((size_t)report->tasks + 1, sizeof *pairs);
    if (!pairs) {
        page->failed = true;
        return;
    }
    size_t before = page->length;
    trn_page_put(page, "<h2>Recovery of ");
    trn_page_text(page, report->column[0].name);
    trn_page_put(page,
                 "</h2>\n<p class=\"soft\">(score - chance) / (teacher's score - chance), the mean over tasks where "
                 "the teacher is more than three standard errors above chance, with the 95 %% interval of a paired "
                 "bootstrap.</p>\n<div class=\"wide\"><table><thead><tr><th>checkpoint</th><th>recovery</th>"
                 "<th>interval</th><th>ratio of scores</th><th>tasks</th></tr></thead><tbody>\n");
    int students = 0;
    for (int c = 1; c < report->columns; c++) {
        int count = 0;
        for (int t = 0; t < report->tasks; t++)
            count += find_pair(&report->column[c], &report->column[0], report->task[t], &pairs[count]);
        if (count == 0)
            continue;
        put_student(page, &report->column[c], pairs, count);
        students++;
    }
    trn_page_put(page, "</tbody></table></div>\n");
    if (students == 0)
        trn_page_drop(page, before);
    free(pairs);
}
