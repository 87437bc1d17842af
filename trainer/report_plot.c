// SPDX-License-Identifier: Apache-2.0
// Line plots; see report_page.h. A plot is 520 units wide and is scaled to its box; ticks are the round numbers (or, on
// a logarithmic axis, the powers) nearest to a handful. Nothing is drawn where no point is finite.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/report_page.h"

enum { WIDTH = 520, HEIGHT = 300, LEFT = 72, RIGHT = 14, TOP = 12, BOTTOM = 46, TICKS = 6 };

static const double Z = 1.96; // of a 95 % interval

typedef struct scale {
    double low, high; // of the data, in logarithms where log
    bool log, decimal;
} scale;

// Curves have no marks: when the colours are used up the dashes change.
static const char *dash_of(const trn_plot *plot, int series) {
    static const char *const dashes[TRN_PLOT_CURVES / TRN_PLOT_SERIES] = {"none", "7 3", "2 3", "9 3 2 3"};
    return plot->curves ? dashes[series / TRN_PLOT_SERIES] : dashes[series / (TRN_PLOT_SERIES / 2)];
}

static double along(const scale *s, double value) {
    return s->log ? log(value) : value;
}

static void widen(scale *s, double value) {
    if (!isfinite(value) || (s->log && value <= 0))
        return;
    s->low = fmin(s->low, along(s, value));
    s->high = fmax(s->high, along(s, value));
}

static bool is_drawn(const trn_plot *plot, const trn_point *point) {
    return isfinite(point->x) && isfinite(point->y) && (!(plot->log_x || plot->log10_x) || point->x > 0) &&
           (!plot->log10_y || point->y > 0);
}

static double x_of(const scale *s, double value) {
    return LEFT + (along(s, value) - s->low) / (s->high - s->low) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const scale *s, double value) {
    return HEIGHT - BOTTOM - (along(s, value) - s->low) / (s->high - s->low) * (HEIGHT - TOP - BOTTOM);
}

static int drawn_series(const trn_plot *plot) {
    const int most = plot->curves ? TRN_PLOT_CURVES : TRN_PLOT_SERIES;
    return plot->count < most ? plot->count : most;
}

// Where series have the same places (positions, lengths: logarithmic), their bars stand beside each other.
static double place_of(const trn_plot *plot, const scale *x, int number, double value) {
    return x_of(x, value) + (plot->log_x ? 2 * (number - 0.5 * (drawn_series(plot) - 1)) : 0);
}

// Ranges of what is drawn, with some room around. false: nothing is.
static bool find_scales(const trn_plot *plot, scale *x, scale *y) {
    *x = (scale){INFINITY, -INFINITY, plot->log_x || plot->log10_x, plot->log10_x};
    *y = (scale){INFINITY, -INFINITY, plot->log10_y, plot->log10_y};
    for (int s = 0; s < drawn_series(plot); s++) {
        for (int i = 0; i < plot->series[s].raws; i++)
            if (is_drawn(plot, &plot->series[s].raw[i]))
                widen(y, plot->series[s].raw[i].y);
        for (int i = 0; i < plot->series[s].points; i++) {
            const trn_point *point = &plot->series[s].point[i];
            double error = isfinite(point->error) ? Z * point->error : 0;
            if (!plot->series[s].level && !is_drawn(plot, point))
                continue;
            if (!plot->series[s].level)
                widen(x, point->x);
            widen(y, point->y - error);
            widen(y, point->y + error);
        }
    }
    if (x->low > x->high || y->low > y->high)
        return false;
    widen(x, plot->mark);
    widen(y, plot->chance);
    double x_room = x->high > x->low ? 0.04 * (x->high - x->low) : 0.5;
    double y_room = y->high > y->low ? 0.08 * (y->high - y->low) : fmax(0.01, 0.05 * fabs(y->high));
    x->low -= x_room;
    x->high += x_room;
    y->low -= y_room;
    y->high += y_room;
    if (plot->percent) {
        y->low = fmax(y->low, -0.01);
        y->high = fmin(y->high, 1.01);
    }
    return true;
}

static double round_step(double range) {
    double raw = range / TICKS, power = pow(10, floor(log10(raw))), digit = raw / power;
    return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

static void put_x_tick(trn_page *page, const scale *x, double value, const char *label) {
    double at = x_of(x, value);
    trn_page_put(page,
                 "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>"
                 "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>",
                 at, at, TOP, HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 17, label);
}

// "12M" of large numbers.
static void short_number(char *label, size_t size, double value) {
    static const char units[] = " kMGT";
    int unit = 0;
    while (fabs(value) >= 1000 && unit + 2 < (int)sizeof units) {
        value /= 1000;
        unit++;
    }
    if (unit > 0)
        snprintf(label, size, "%.4g%c", value, units[unit]);
    else
        snprintf(label, size, "%.4g", value);
}

// 1, 2 and 5 times the powers of ten in a range; where that is too many, the powers. Returns how many.
enum { MOST_TICKS = 64 };
static int decimal_ticks(const scale *s, double tick[MOST_TICKS]) {
    static const double digits[] = {1, 2, 5};
    const double low = exp(s->low), high = exp(s->high), decades = (s->high - s->low) / log(10);
    const int each = decades > 3 ? 1 : 3;
    int count = 0;
    for (double power = pow(10, floor(log10(low))); power <= high && count + each < MOST_TICKS; power *= 10)
        for (int i = 0; i < each; i++)
            if (digits[i] * power >= low && digits[i] * power <= high)
                tick[count++] = digits[i] * power;
    return count;
}

static void put_x_ticks(trn_page *page, const scale *x) {
    char label[32];
    if (!x->log) {
        double step = round_step(x->high - x->low);
        for (double value = ceil(x->low / step) * step; value <= x->high; value += step) {
            short_number(label, sizeof label, fabs(value) < step / 2 ? 0 : value);
            put_x_tick(page, x, value, label);
        }
        return;
    }
    if (x->decimal) {
        double tick[MOST_TICKS];
        for (int i = 0, count = decimal_ticks(x, tick); i < count; i++) {
            short_number(label, sizeof label, tick[i]);
            put_x_tick(page, x, tick[i], label);
        }
        return;
    }
    double octaves = (x->high - x->low) / log(2), every = ceil(octaves / TICKS);
    for (double power = ceil(x->low / log(2)); power * log(2) <= x->high; power += every) {
        snprintf(label, sizeof label, "%g", exp2(power));
        put_x_tick(page, x, exp2(power), label);
    }
}

static void put_y_tick(trn_page *page, const scale *y, double value, const char *label) {
    trn_page_put(page,
                 "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>"
                 "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>",
                 LEFT, WIDTH - RIGHT, y_of(y, value), y_of(y, value), LEFT - 7, y_of(y, value) + 4, label);
}

static void put_decimal_y_ticks(trn_page *page, const scale *y) {
    double tick[MOST_TICKS];
    for (int i = 0, count = decimal_ticks(y, tick); i < count; i++) {
        char label[32];
        snprintf(label, sizeof label, "%.3g", tick[i]);
        put_y_tick(page, y, tick[i], label);
    }
}

static void put_y_ticks(trn_page *page, const trn_plot *plot, const scale *y) {
    if (y->log) {
        put_decimal_y_ticks(page, y);
        return;
    }
    double step = round_step(y->high - y->low);
    int digits = step < 1 ? (int)ceil(-log10(step) - 1e-9) : 0;
    for (double value = ceil(y->low / step) * step; value <= y->high; value += step) {
        char label[32];
        double shown = fabs(value) < step / 2 ? 0 : value;
        if (plot->percent)
            snprintf(label, sizeof label, "%.*f %%", digits > 2 ? digits - 2 : 0, 100 * shown);
        else
            snprintf(label, sizeof label, "%.*f", digits, shown);
        put_y_tick(page, y, value, label);
    }
}

static void put_axes(trn_page *page, const trn_plot *plot, const scale *x, const scale *y) {
    put_x_ticks(page, x);
    put_y_ticks(page, plot, y);
    trn_page_put(page, "<path class=\"axis\" fill=\"none\" d=\"M%d %dV%dH%d\"/>", LEFT, TOP, HEIGHT - BOTTOM,
                 WIDTH - RIGHT);
    trn_page_put(page, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
    trn_page_text(page, plot->x_name);
    trn_page_put(page, "</text><text transform=\"translate(13 %d) rotate(-90)\" text-anchor=\"middle\">",
                 (TOP + HEIGHT - BOTTOM) / 2);
    trn_page_text(page, plot->y_name);
    trn_page_put(page, "</text>");
    if (isfinite(plot->chance))
        trn_page_put(page,
                     "<line class=\"guide\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>"
                     "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">chance</text>",
                     LEFT, WIDTH - RIGHT, y_of(y, plot->chance), y_of(y, plot->chance), WIDTH - RIGHT - 3,
                     y_of(y, plot->chance) - 4);
    if (isfinite(plot->mark))
        trn_page_put(page,
                     "<line class=\"guide\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>"
                     "<text x=\"%.1f\" y=\"%d\" text-anchor=\"end\">%s</text>",
                     x_of(x, plot->mark), x_of(x, plot->mark), TOP, HEIGHT - BOTTOM, x_of(x, plot->mark) - 4, TOP + 12,
                     plot->mark_name);
}

static void put_shape(trn_page *page, int series, double x, double y) {
    switch (series % 4) {
    case 0:
        trn_page_put(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.6\"/>", x, y);
        break;
    case 1:
        trn_page_put(page, "<rect x=\"%.1f\" y=\"%.1f\" width=\"6.8\" height=\"6.8\"/>", x - 3.4, y - 3.4);
        break;
    case 2:
        trn_page_put(page, "<path d=\"M%.1f %.1fl4.3 7.4h-8.6z\"/>", x, y - 4.8);
        break;
    default:
        trn_page_put(page, "<path d=\"M%.1f %.1fl4.6 4.6 -4.6 4.6 -4.6 -4.6z\"/>", x, y - 4.6);
    }
}

static void put_value(trn_page *page, const trn_plot *plot, const trn_series *series, const trn_point *point) {
    double factor = plot->percent ? 100 : 1;
    const char *unit = plot->percent ? " %" : "";
    trn_page_put(page, "<title>");
    trn_page_text(page, series->name);
    trn_page_put(page, ", ");
    trn_page_text(page, point->label);
    trn_page_put(page, ": %.4g%s", factor * point->y, unit);
    if (isfinite(point->error))
        trn_page_put(page, " ± %.2g%s", factor * point->error, unit);
    trn_page_put(page, "</title>");
}

static void put_points(trn_page *page, const trn_plot *plot, const trn_point *point, int points, int number,
                       const scale *x, const scale *y) {
    bool pen = false;
    for (int i = 0; i < points; i++)
        if (is_drawn(plot, &point[i])) {
            trn_page_put(page, "%c%.1f %.1f", pen ? 'L' : 'M', place_of(plot, x, number, point[i].x),
                         y_of(y, point[i].y));
            pen = true;
        }
}

static void put_line(trn_page *page, const trn_plot *plot, const trn_series *series, int number, const scale *x,
                     const scale *y) {
    trn_page_put(page, "<path fill=\"none\" stroke-width=\"2\" stroke-dasharray=\"%s\" d=\"",
                 series->level ? "3 3" : dash_of(plot, number));
    if (series->level)
        trn_page_put(page, "M%d %.1fH%d", LEFT, y_of(y, series->point[0].y), WIDTH - RIGHT);
    else
        put_points(page, plot, series->point, series->points, number, x, y);
    trn_page_put(page, "\"/>");
}

// A curve with what it smooths behind it; it is named where it is pointed at.
static void put_curve(trn_page *page, const trn_plot *plot, const trn_series *series, int number, const scale *x,
                      const scale *y) {
    trn_page_put(page, "<title>");
    trn_page_text(page, series->name);
    if (series->points > 0)
        trn_page_put(page, ", %.4g at the end", series->point[series->points - 1].y);
    trn_page_put(page, "</title>");
    if (series->raws > 0) {
        trn_page_put(page, "<path fill=\"none\" stroke-width=\"1\" opacity=\".3\" d=\"");
        put_points(page, plot, series->raw, series->raws, number, x, y);
        trn_page_put(page, "\"/>");
    }
    put_line(page, plot, series, number, x, y);
    const trn_point *end = series->points > 0 ? &series->point[series->points - 1] : NULL;
    if (end && is_drawn(plot, end))
        trn_page_put(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\"/>", x_of(x, end->x), y_of(y, end->y));
}

static void put_series(trn_page *page, const trn_plot *plot, int number, const scale *x, const scale *y) {
    const trn_series *series = &plot->series[number];
    const int colour = number % TRN_PLOT_SERIES;
    trn_page_put(page, "<g class=\"c%d\" stroke=\"var(--s%d)\" fill=\"var(--s%d)\">", number, colour, colour);
    if (plot->curves)
        put_curve(page, plot, series, number, x, y);
    else
        put_line(page, plot, series, number, x, y);
    for (int i = 0; i < series->points && !series->level && !plot->curves; i++) {
        const trn_point *point = &series->point[i];
        if (!is_drawn(plot, point))
            continue;
        double at = place_of(plot, x, number, point->x);
        trn_page_put(page, "<g>");
        if (isfinite(point->error) && point->error > 0)
            trn_page_put(page, "<path d=\"M%.1f %.1fV%.1f\" stroke-width=\"1.2\" opacity=\".65\"/>", at,
                         y_of(y, fmax(point->y - Z * point->error, y->low)),
                         y_of(y, fmin(point->y + Z * point->error, y->high)));
        put_shape(page, number, at, y_of(y, point->y));
        put_value(page, plot, series, point);
        trn_page_put(page, "</g>");
    }
    trn_page_put(page, "</g>");
}

// Boxes stand before what they hide: the page's style does the rest.
static void put_boxes(trn_page *page, const trn_plot *plot) {
    for (int s = 0; s < drawn_series(plot); s++) {
        trn_page_put(page, "<input type=\"checkbox\" class=\"box b%d\" id=\"f%ds%d\" checked aria-label=\"", s,
                     page->figures, s);
        trn_page_text(page, plot->series[s].name);
        trn_page_put(page, "\">");
    }
}

static void put_key(trn_page *page, const trn_plot *plot) {
    trn_page_put(page, "<ul class=\"key\">");
    for (int s = 0; s < drawn_series(plot); s++) {
        const bool level = plot->series[s].level;
        const int colour = s % TRN_PLOT_SERIES;
        trn_page_put(page,
                     "<li class=\"k%d\"><label for=\"f%ds%d\"><svg viewBox=\"0 0 34 12\" aria-hidden=\"true\">"
                     "<g stroke=\"var(--s%d)\" fill=\"var(--s%d)\">"
                     "<path d=\"M1 6H33\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>",
                     s, page->figures, s, colour, colour, level ? "3 3" : dash_of(plot, s));
        if (!level && !plot->curves)
            put_shape(page, s, 17, 6);
        trn_page_put(page, "</g></svg>");
        trn_page_text(page, plot->series[s].name);
        trn_page_put(page, "</label></li>");
    }
    if (plot->count > drawn_series(plot))
        trn_page_put(page, "<li class=\"soft\">and %d more, in the tables alone</li>",
                     plot->count - drawn_series(plot));
    trn_page_put(page, "</ul>");
}

void trn_page_plot(trn_page *page, const trn_plot *plot) {
    scale x, y;
    if (!find_scales(plot, &x, &y))
        return;
    page->figures++;
    trn_page_put(page, "<figure><figcaption>");
    trn_page_text(page, plot->title);
    trn_page_put(page, "</figcaption>");
    put_boxes(page, plot);
    trn_page_put(page, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    trn_page_text(page, plot->title);
    trn_page_put(page, "\">");
    put_axes(page, plot, &x, &y);
    for (int s = 0; s < drawn_series(plot); s++)
        put_series(page, plot, s, &x, &y);
    trn_page_put(page, "</svg>");
    put_key(page, plot);
    trn_page_put(page, "</figure>\n");
}
