#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shared by the shell tests: where they are, a folder of their own, and how they fail.
#
# Sourced. Sets source_dir, build and folder, which is removed at the end, and counts failures; a test ends with
# "exit $((failures > 0))".
set -uo pipefail
source_dir=${MESA_SOURCE:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
build=$(realpath -m "${MESA_BUILD:-$source_dir/build}")
failures=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

need_built() { # PROGRAM...: of the build; without them the test is skipped
    local program
    for program; do
        [ -x "$build/$program" ] || { echo "SKIP: $build/$program is not built"; exit 77; }
    done
}
need_installed() { # PROGRAM...: of this machine
    local program
    for program; do
        command -v "$program" >/dev/null || { echo "SKIP: $program is not installed"; exit 77; }
    done
}

fail() {
    echo "FAIL: $1"
    failures=$((failures + 1))
}
same() { # WHAT WANTED FOUND
    [ "$2" = "$3" ] || fail "$1: \"$3\", want \"$2\""
}
