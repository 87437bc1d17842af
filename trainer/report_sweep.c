// SPDX-License-Identifier: Apache-2.0
// The table of a sweep on a page; see report_sweep.h. The best of each variant is marked, with the edge of the grid
// that it lies at, and a setting of which a seed has failed tells why.
#include "trainer/report_sweep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/progress.h"
#include "trainer/sweep_internal.h"

static const char file_name[] = "sweep.json";

static char *file_of(const char *path) {
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISDIR(facts.st_mode) ? eng_join_path(path, file_name) : strdup(path);
}

bool trn_report_is_sweep(const char *path) {
    struct stat facts;
    char *file = file_of(path);
    const size_t length = file ? strlen(file) : 0, own = sizeof file_name - 1;
    const bool named = length >= own && strcmp(file + length - own, file_name) == 0;
    const bool is = named && stat(file, &facts) == 0;
    free(file);
    return is;
}

static void put_real(trn_page *page, double value, int digits) {
    if (isfinite(value))
        trn_page_put(page, "<td>%.*f</td>", digits, value);
    else
        trn_page_put(page, "<td>-</td>");
}

static void put_state(trn_page *page, const trn_sweep_group *group) {
    trn_page_put(page, "<td class=\"name\">");
    if (group->failed > 0) {
        trn_page_put(page, "<span class=\"bad\">%d failed</span> <small>", group->failed);
        trn_page_text(page, group->reason);
        trn_page_put(page, "</small>");
    } else if (group->open > 0) {
        trn_page_put(page, "%d not finished", group->open);
    } else if (group->best) {
        trn_page_put(page, "<span class=\"good\">best</span> <small>");
        trn_page_text(page, group->edge);
        trn_page_put(page, "</small>");
    }
    trn_page_put(page, "</td></tr>\n");
}

static void put_group(trn_page *page, const trn_sweep_group *group, bool taught) {
    char time[24];
    trn_page_put(page, "<tr><th scope=\"row\">");
    trn_page_text(page, group->variant);
    trn_page_put(page, "%s", group->variant[0] && group->setting[0] ? ", " : "");
    trn_page_text(page, group->setting);
    trn_page_put(page, "</th><td>%d</td>", group->done);
    put_real(page, group->valid, 4);
    put_real(page, group->deviation, 4);
    put_real(page, 100 * group->accuracy, 2);
    if (taught)
        put_real(page, group->divergence, 4);
    put_real(page, group->loss, 4);
    trn_page_put(page, "<td>%s</td>", isfinite(group->seconds) ? trn_duration(group->seconds, time) : "-");
    put_state(page, group);
}

eng_status trn_report_sweep(trn_page *page, const char *path, eng_error *error) {
    trn_sweep_group *group = NULL;
    int groups = 0;
    char *file = file_of(path);
    eng_status status = file ? trn_sweep_read_groups(file, &group, &groups, error)
                             : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    free(file);
    if (status != ENG_OK)
        return status;
    const bool taught = trn_sweep_is_taught(group, groups);
    trn_page_put(page, "<h2>Sweep ");
    trn_page_text(page, eng_path_tail(path));
    trn_page_put(page,
                 "</h2>\n<p class=\"soft\">Means over the seeds that are done, with their standard deviation. The "
                 "best of a variant has the least mean of those without a failure.</p>\n<div class=\"wide\">"
                 "<table><thead><tr><th>setting</th><th>runs</th><th>validation</th><th>sd</th><th>right, %%</th>"
                 "%s<th>loss<br><small>last steps</small></th><th>time<br><small>a run</small></th>"
                 "<th class=\"name\"></th></tr></thead><tbody>\n",
                 taught ? "<th>divergence</th>" : "");
    for (int g = 0; g < groups; g++)
        put_group(page, &group[g], taught);
    trn_page_put(page, "</tbody></table></div>\n");
    free(group);
    return ENG_OK;
}
