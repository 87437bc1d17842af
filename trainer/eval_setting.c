// SPDX-License-Identifier: Apache-2.0
// Names of solver settings; see eval_setting.h.
// What a setting does not say stays as the knobs have it. No state; any thread.
#include "trainer/eval_setting.h"

#include <stdio.h>
#include <string.h>

#include "trainer/options.h"

static trn_setting tolerance(const eng_knobs *knobs, double value) {
    trn_setting setting = {.knobs = *knobs};
    setting.knobs.cg_mode = ENG_CG_TOLERANCE;
    setting.knobs.cg_tolerance = (float)value;
    snprintf(setting.name, sizeof setting.name, "tolerance %g", value);
    return setting;
}

static trn_setting steps(const eng_knobs *knobs, int64_t count) {
    trn_setting setting = {.knobs = *knobs};
    setting.knobs.cg_mode = ENG_CG_STEPS;
    setting.knobs.cg_max_steps = (int32_t)count;
    snprintf(setting.name, sizeof setting.name, "steps %d", (int)count);
    return setting;
}

static trn_setting exact(const eng_knobs *knobs) {
    trn_setting setting = {.name = "exact", .knobs = *knobs};
    setting.knobs.cg_mode = ENG_CG_EXACT;
    return setting;
}

eng_status trn_setting_parse(const char *text, const eng_knobs *knobs, trn_setting *out, eng_error *error) {
    const char *value = strchr(text, ':');
    size_t length = value ? (size_t)(value - text) : strlen(text);
    eng_status status = ENG_OK;
    double real = 0;
    int64_t count = 0;
    if (strcmp(text, "exact") == 0) {
        *out = exact(knobs);
        return ENG_OK;
    }
    if (value && length == strlen("tolerance") && strncmp(text, "tolerance", length) == 0) {
        status = trn_parse_real("--solver tolerance", value + 1, &real, error);
        if (status == ENG_OK && !(real >= 0 && real <= 1))
            status = eng_fail(error, ENG_INVALID, "--solver %.40s: not in 0..1", text);
        *out = tolerance(knobs, real);
        return status;
    }
    if (value && length == strlen("steps") && strncmp(text, "steps", length) == 0) {
        status = trn_parse_integer("--solver steps", value + 1, &count, error);
        if (status == ENG_OK && (count < 0 || count > 256))
            status = eng_fail(error, ENG_INVALID, "--solver %.40s: not in 0..256", text);
        *out = steps(knobs, count);
        return status;
    }
    return eng_fail(error, ENG_INVALID, "--solver: \"%.40s\" is none of tolerance:X, steps:N, exact", text);
}

void trn_setting_table(const eng_knobs *knobs, trn_setting out[TRN_TABLE_SETTINGS]) {
    static const double tolerances[] = {1, 1e-1, 1e-2, 1e-3, 1e-4};
    static const int32_t counts[] = {1, 2, 4, 6, 8, 10, 15, 20, 30};
    int settings = 0;
    for (size_t i = 0; i < sizeof tolerances / sizeof *tolerances; i++)
        out[settings++] = tolerance(knobs, tolerances[i]);
    out[settings++] = exact(knobs);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        out[settings++] = steps(knobs, counts[i]);
}
