#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Python with the packages of real clients: the system's where it has them, else a virtual environment below the build
# folder, made once.
#
# Sourced: need_python NAME MODULE... sets python, or ends the test as skipped; packages are those of NAME.txt beside
# this file. Run: tests/clients/venv.sh makes all of them ahead of the tests, which have less time. MESA_VENVS is the
# folder of the environments where several builds share them.
venv_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv_build=${MESA_VENVS:-${MESA_BUILD:-$venv_dir/../../build}/clients}

make_venv() { # NAME FOLDER
    rm -rf "$2"
    python3 -m venv "$2" &&
        "$2/bin/pip" install --quiet --disable-pip-version-check --retries 1 --timeout 20 -r "$venv_dir/$1.txt" &&
        touch "$2/whole"
}

ensure_venv() { # NAME FOLDER: one at a time, tests run beside each other
    mkdir -p "$(dirname "$2")"
    (
        flock 9
        [ -f "$2/whole" ] || make_venv "$1" "$2" >"$2.log" 2>&1
    ) 9>"$2.lock"
}

need_python() { # NAME MODULE...
    local name=$1 folder=$venv_build/$1 module imports=
    shift
    command -v python3 >/dev/null || { echo "SKIP: python3 is not installed"; exit 77; }
    for module; do
        imports+="import $module;"
    done
    if python3 -c "$imports" 2>/dev/null; then
        python=python3
        return
    fi
    if ! ensure_venv "$name" "$folder"; then
        tail -n 3 "$folder.log"
        echo "SKIP: the packages of tests/clients/$name.txt cannot be had"
        exit 77
    fi
    python=$folder/bin/python
    "$python" -c "$imports" || { echo "FAIL: $folder lacks a package"; exit 1; }
}

# Packages that are too large to be installed for a test: sets python to the first of python3 and of MESA_PYTHONS
# (interpreters, separated by spaces) that has them; false where none has.
find_python() { # MODULE...
    local candidate imports
    imports=$(printf 'import %s;' "$@")
    for candidate in python3 ${MESA_PYTHONS:-}; do
        if "$candidate" -c "$imports" >/dev/null 2>&1; then
            python=$candidate
            return 0
        fi
    done
    echo "skipped: no Python has $* (MESA_PYTHONS names more)"
    return 1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    status=0
    for list in "$venv_dir"/*.txt; do
        name=$(basename "$list" .txt)
        ensure_venv "$name" "$venv_build/$name" || status=77
    done
    exit $status
fi
