// SPDX-License-Identifier: Apache-2.0
// The configuration written out: as help, and as a file that reads back to the same.
// Every word comes from the table of options. Main thread.
#include <string.h>

#include "server/config_private.h"

static void print_spelling(const srv_option *row, char *text, size_t size) {
    snprintf(text, size, "--%s %s", row->name, row->argument);
    for (char *at = text; *at && *at != ' '; at++)
        if (*at == '_')
            *at = '-';
}

// Words of text, wrapped and indented under the column where the first line stands.
static void print_wrapped(const char *text, FILE *out) {
    enum { INDENT = 35, WIDTH = 100 };
    size_t column = INDENT;

    while (*text) {
        const size_t length = strcspn(text, " ");
        if (column > INDENT && column + 1 + length > WIDTH) {
            fprintf(out, "\n%*s", INDENT, "");
            column = INDENT;
        } else if (column > INDENT) {
            fputc(' ', out);
            column++;
        }
        fwrite(text, 1, length, out);
        column += length;
        text += length;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

void srv_config_help(FILE *out) {
    fputs("Usage: mesa-server --model [NAME=]DIR [OPTION]...\n"
          "Serves recurrent-state language models over an OpenAI-compatible HTTP interface.\n\n",
          out);
    for (size_t i = 0; i < srv_config_option_count; i++) {
        const srv_option *row = &srv_config_options[i];
        char spelling[80], about[256];
        print_spelling(row, spelling, sizeof spelling);
        snprintf(about, sizeof about, row->fallback ? "%s (default %s)" : "%s", row->about, row->fallback);
        fprintf(out, "  %-32s ", spelling);
        print_wrapped(about, out);
    }
    fputs("  --config FILE                    read options from section [server] of an INI file\n"
          "  --check-config                   check the configuration, print it, and exit\n"
          "  --hash-key                       read a key from standard input, print its SHA-256 for --keys, and exit\n"
          "  --help, -h                       print this and exit\n"
          "  --version                        print the version and exit\n\n"
          "Each option is also a key of the file (queue_tokens = N) and a variable of the environment\n"
          "(MESA_QUEUE_TOKENS=N; lists separated by commas). The command line wins over the environment, the\n"
          "environment over the file. Lists in the file are repeated keys. A path credential:NAME is the file\n"
          "NAME in $CREDENTIALS_DIRECTORY.\n\n"
          "A new key: openssl rand -hex 32 | tee key | mesa-server --hash-key, then a line \"NAME HASH\" for --keys.\n"
          "Without --keys the server listens only where other machines do not reach it.\n\n"
          "SIGTERM and SIGINT finish the running requests, a second one ends at once; SIGHUP reads the\n"
          "configuration, keys, certificates and checkpoints again.\n"
          "Exit status: 0 ended as asked, 1 a fault while serving, 2 usage or configuration, 3 cannot listen,\n"
          "4 a model cannot be loaded.\n",
          out);
}

static void print_integer(const srv_option *row, int64_t value, FILE *out) {
    const bool automatic = row->kind == SRV_OPTION_AUTO || row->kind == SRV_OPTION_AUTO_BYTES;

    if (value == 0 && automatic)
        fprintf(out, "%s = auto\n", row->name);
    else
        fprintf(out, "%s = %lld\n", row->name, (long long)value);
}

static void print_row(const srv_config *config, const srv_option *row, FILE *out) {
    const void *member = (const char *)config + row->offset;

    switch (row->kind) {
    case SRV_OPTION_MODELS:
        for (size_t i = 0; i < config->model_count; i++)
            fprintf(out, "model = %s=%s\n", config->models[i].name, config->models[i].folder);
        break;
    case SRV_OPTION_LISTENERS:
        for (size_t i = 0; i < config->listen_count; i++)
            fprintf(out, "listen = %s\n", config->listen[i]);
        break;
    case SRV_OPTION_LISTENER:
    case SRV_OPTION_TEXT:
    case SRV_OPTION_PATH:
        if (*(char *const *)member)
            fprintf(out, "%s = %s\n", row->name, *(char *const *)member);
        break;
    case SRV_OPTION_AUTO:
    case SRV_OPTION_AUTO_BYTES:
    case SRV_OPTION_INTEGER:
    case SRV_OPTION_BYTES:
        print_integer(row, *(const int64_t *)member, out);
        break;
    case SRV_OPTION_SECONDS:
        fprintf(out, "%s = %.10g\n", row->name, (double)*(const int64_t *)member / 1000);
        break;
    case SRV_OPTION_NUMBER:
        fprintf(out, "%s = %.17g\n", row->name, *(const double *)member);
        break;
    case SRV_OPTION_YES_NO:
        fprintf(out, "%s = %s\n", row->name, *(const bool *)member ? "yes" : "no");
        break;
    case SRV_OPTION_MODE:
        fprintf(out, "%s = %04llo\n", row->name, (unsigned long long)*(const int64_t *)member);
        break;
    case SRV_OPTION_LEVEL:
    case SRV_OPTION_STORAGE:
        fprintf(out, "%s = %s\n", row->name, srv_config_choices[row->kind][*(const int64_t *)member]);
        break;
    case SRV_OPTION_KINDS:
        break;
    }
}

void srv_config_print(const srv_config *config, FILE *out) {
    fputs("[server]\n", out);
    for (size_t i = 0; i < srv_config_option_count; i++)
        print_row(config, &srv_config_options[i], out);
}
