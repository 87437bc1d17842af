#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Configures, builds and tests; ends with one line "N passed, N failed" (", N skipped" when some were).
#
# Counted are libcheck's checks (not its programs) and shell tests, one each. A program that dies without a count is one
# failure; a SKIP line of a check and exit status 77 of a program are skips, never passes. The whole output is kept in
# BUILD/tests.log; what a failing test printed is shown.
#
#   tests/run.sh [CTEST ARGUMENT...]        for example: tests/run.sh -L kernels
# Environment: MESA_BUILD (build folder; default build, or build-SANITIZER), SANITIZE, MESA_CUDA, CC, JOBS (default 2);
# MESA_CPU_ISA and MESA_SHARED reach the tests as they are.
set -uo pipefail

source_dir=$(cd "$(dirname "$0")/.." && pwd)
sanitize=${SANITIZE:-}
default_build=build
if [ -n "$sanitize" ]; then
    default_build=build-$(tr ';,' '--' <<<"$sanitize")
fi
build=${MESA_BUILD:-$default_build}
[[ $build = /* ]] || build=$source_dir/$build
compiler=${CC:-gcc}
jobs=${JOBS:-2}

finish() { # PASSED FAILED SKIPPED
    if [ "$3" -gt 0 ]; then
        echo "$1 passed, $2 failed, $3 skipped"
    else
        echo "$1 passed, $2 failed"
    fi
    [ "$2" -eq 0 ]
    exit
}

fault() {
    echo "tests/run.sh: $1" >&2
    finish 0 1 0
}

need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null ||
        fault "$1 is missing: install the package $2 (deploy/install-packages.sh installs all that is needed)"
}

need cmake cmake
need ctest cmake
need ninja ninja-build
need "$compiler" build-essential
need pkg-config pkg-config
need nm build-essential
need curl curl
need jq jq
pkg-config --exists check ||
    fault "libcheck is missing: install the package check (deploy/install-packages.sh installs all that is needed)"

options=(-DWERROR=ON "-DSANITIZE=$sanitize" "-DCMAKE_C_COMPILER=$compiler")
if [ -n "${MESA_CUDA:-}" ]; then
    options+=("-DMESA_CUDA=$MESA_CUDA")
fi
cmake -S "$source_dir" -B "$build" -G Ninja "${options[@]}" >"$build.configure.log" 2>&1 || {
    cat "$build.configure.log"
    rm -f "$build.configure.log"
    fault "configuring failed"
}
mv "$build.configure.log" "$build/configure.log"
grep -E "^-- .*(CUDA module|left out)|Warning" "$build/configure.log" | sort -u

ninja -C "$build" -j "$jobs" >"$build/build.log" 2>&1 || {
    grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking)|^ninja: Entering' "$build/build.log"
    fault "the build failed (whole output: $build/build.log)"
}

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}
launcher=()
# ThreadSanitizer of gcc 12 and 13 cannot start where the kernel randomises more address bits than it knows of.
if [[ $sanitize == *thread* ]] && setarch "$(uname -m)" -R true 2>/dev/null; then
    launcher=(setarch "$(uname -m)" -R)
fi

log=$build/tests.log
echo "testing in $build (${MESA_CPU_ISA:-best} instruction set, ${sanitize:-no} sanitizer)"
"${launcher[@]}" ctest --test-dir "$build" -V -j "$jobs" --no-tests=error "$@" 2>&1 | tee "$log" |
    grep --line-buffered -E '^ *[0-9]+/[0-9]+ +Test +#'

# One pass over ctest's verbose output: lines of test N begin with "N: ", its verdict is a line "k/n Test #N: ...".
counts=$(awk '
    match($0, /^[0-9]+: /) {
        test = substr($0, 1, RLENGTH - 2)
        if (match($0, /Checks: [0-9]+, Failures: [0-9]+, Errors: [0-9]+/)) {
            split(substr($0, RSTART, RLENGTH), field, /[^0-9]+/)
            checks[test] += field[2]
            bad[test] += field[3] + field[4]
        } else if ($0 ~ /^[0-9]+: SKIP /)
            skips[test]++
        next
    }
    match($0, /^ *[0-9]+\/[0-9]+ +Test +#[0-9]+:/) {
        test = substr($0, RSTART, RLENGTH)
        sub(/.*#/, "", test)
        sub(/:.*/, "", test)
        if ($0 ~ /\*\*\*Skipped/) {
            skipped++
            next
        }
        ok = $0 ~ / Passed /
        faults = bad[test] + 0
        if (!ok && faults == 0)
            faults = 1
        good = checks[test] ? checks[test] - bad[test] - skips[test] : ok
        passed += good > 0 ? good : 0
        failed += faults
        skipped += skips[test]
        if (faults)
            names = names " " test
    }
    END { printf "%d %d %d%s\n", passed, failed, skipped, names }' "$log")
read -r passed failed skipped failing <<<"$counts"

for test in $failing; do
    echo "---- output of failing test $test"
    grep -E "^$test: " "$log" | sed "s/^$test: //" | tail -n 100
done
if [ "$skipped" -gt 0 ]; then
    echo "---- skipped"
    grep -E '^[0-9]+: SKIP |\*\*\*Skipped' "$log" | sed -E 's/^[0-9]+: //'
fi
if [ $((passed + failed + skipped)) -eq 0 ]; then
    tail -n 5 "$log"
    fault "no test ran"
fi
finish "$passed" "$failed" "$skipped"
