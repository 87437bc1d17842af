// SPDX-License-Identifier: Apache-2.0
// Status codes and error text of the engine.
//
// One convention everywhere: a fallible function returns an eng_status, 0 is success, negative is failure. A caller
// who wants words passes an eng_error; it may be NULL. The first failure wins, and success leaves it untouched. The
// text names the field, file, tensor or offset at fault, never contains a pointer, and is printable UTF-8: whatever
// else a file's names hold becomes '?'.
#ifndef ENGINE_STATUS_H
#define ENGINE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ENG_CHECKED __attribute__((warn_unused_result))
#define ENG_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define ENG_EXPORT __attribute__((visibility("default")))
#else
#define ENG_CHECKED
#define ENG_PRINTF(text, first)
#define ENG_EXPORT
#endif

#define ENG_STATUS_MAP(X)                                             \
    X(OK, 0, "ok")                                                    \
    X(INVALID, -1, "invalid argument")                                \
    X(FORMAT, -2, "malformed file")                                   \
    X(UNSUPPORTED, -3, "not supported")                               \
    X(NOT_FOUND, -4, "not found")                                     \
    X(NO_MEMORY, -5, "out of memory")                                 \
    X(IO, -6, "input or output failed")                               \
    X(FULL, -7, "a bounded queue or pool is full")                    \
    X(TOO_LONG, -8, "longer than the context or a limit")             \
    X(NUMERIC, -9, "non-finite logits or state")                      \
    X(UNCONVERGED, -10, "a solve hit its bound before its tolerance") \
    X(CANCELLED, -11, "cancelled")                                    \
    X(DEVICE, -12, "the device failed or is missing")                 \
    X(INTERNAL, -13, "internal fault")                                \
    X(BUSY, -14, "in use by another request")                         \
    X(CONFLICT, -15, "not what the caller takes it for")

typedef enum eng_status {
#define ENG_STATUS_ENUM(name, value, text) ENG_##name = (value),
    ENG_STATUS_MAP(ENG_STATUS_ENUM)
#undef ENG_STATUS_ENUM
} eng_status;

typedef struct eng_error {
    eng_status code;
    char text[256];
} eng_error;

// The constant text of a code ("unknown status" for a number that is none).
ENG_EXPORT const char *eng_status_text(eng_status status);

// Sets *error to code and the formatted text unless it already holds a failure; returns code. error may be NULL.
ENG_EXPORT eng_status eng_fail(eng_error *error, eng_status code, const char *format, ...) ENG_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
#endif
