// SPDX-License-Identifier: Apache-2.0
// What a load measured, as a table for people and as a line of CSV.
// Times in milliseconds. A quantile that so few samples cannot tell from their maximum is "-", in CSV empty.
#ifndef CLIENTS_CLI_REPORT_H
#define CLIENTS_CLI_REPORT_H

#include "clients/cli/load.h"

void cli_report_table(const cli_load_plan *plan, cli_load_result *result);
void cli_report_csv_header(void);
void cli_report_csv(const cli_load_plan *plan, cli_load_result *result);

#endif
