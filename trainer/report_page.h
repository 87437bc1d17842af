// SPDX-License-Identifier: Apache-2.0
// A self-contained HTML page under construction, and line plots as inline SVG.
//
// Colours are variables of the page's style, so a plot follows light and dark by itself; series differ by colour, by
// dash and by mark, and every point tells its value when it is pointed at. There is no script: a legend's entries are
// the labels of boxes that hide their series. Text from outside is escaped here and nowhere else. A failure of memory
// is remembered and reported once, when the page is taken.
#ifndef TRAINER_REPORT_PAGE_H
#define TRAINER_REPORT_PAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct trn_page {
    char *text;
    size_t length, capacity;
    int figures; // so far
    bool failed;
} trn_page;

void trn_page_begin(trn_page *page, const char *title);
// HTML by a format of this program's; numbers and words of its own alone.
__attribute__((format(printf, 2, 3))) void trn_page_put(trn_page *page, const char *format, ...);
void trn_page_text(trn_page *page, const char *text); // escaped
void trn_page_drop(trn_page *page, size_t length);    // what was put after so many bytes
void trn_page_free(trn_page *page);
// Writes the page and frees it.
ENG_CHECKED eng_status trn_page_write(trn_page *page, const char *path, eng_error *error);

enum { TRN_PLOT_SERIES = 8, TRN_PLOT_CURVES = 32 }; // that can be told apart; of curves, which have no marks

typedef struct trn_point {
    double x, y, error; // error: standard; NAN: none
    char label[40];     // of the point
} trn_point;

typedef struct trn_series {
    char name[120];
    const trn_point *point; // (points) joined in this order
    int points;
    bool level;           // one value for every x: a dashed line across at point[0].y
    const trn_point *raw; // (raws) what was smoothed, drawn faintly behind; of curves
    int raws;
} trn_series;

typedef struct trn_plot {
    char title[160];
    const char *x_name, *y_name;
    bool log_x;            // of places that the series share: they stand a little beside each other
    bool curves;           // many points a series, without marks
    bool log10_x, log10_y; // decimal logarithms
    bool percent;          // y are shares
    double mark;           // a vertical line at this x; NAN: none
    double chance;         // a dotted line across; NAN: none
    const char *mark_name;
    const trn_series *series; // (count); those beyond TRN_PLOT_SERIES are left out and said
    int count;
} trn_plot;

// With error bars of 1.96 standard errors. Points that are not finite are left out. Each series has a box in the legend
// that hides it.
void trn_page_plot(trn_page *page, const trn_plot *plot);

#endif
