#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The README's commands work: every block marked sh is run, in order, in a copy of the tree; the first failure ends it.
#
# Blocks are marked sh (commands) or text (output); anything else is a failure, and so is a command that is not on the
# list below. Not run, because they are tested by other means: quickstart.sh, which installs packages, and run.sh, which
# runs this test. ninja is asked for its plan and the programs of MESA_BUILD are put in place. The server's address is
# moved to a free port. Commands that stand in the text are not run; their options must be ones that --help knows.
set -uo pipefail
cd "${MESA_SOURCE:-$(dirname "$0")/..}" || exit 1
source_dir=$PWD
build=${MESA_BUILD:-build}
[[ $build = /* ]] || build=$source_dir/$build
known=' build/mesa build/mesa-server build/mesa-trainer cat cmake curl echo jq kill mkdir sed seq wait xargs '

fail() {
    echo "FAIL: $1"
    exit 1
}

[ -x "$build/mesa-server" ] && [ -x "$build/mesa-trainer" ] || fail "the programs are not built in $build"
git rev-parse --is-inside-work-tree >/dev/null 2>&1 || { echo "SKIP: git does not list the files here" && exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- commands in the text --------------------------------------------------------------------------------------------

check_options() { # LINE COMMAND...
    local line=$1 program=$2 help word
    shift 2
    [ -x "$build/${program#build/}" ] || fail "README.md:$line: there is no $program"
    if [[ $program == */mesa-trainer || $program == */mesa ]] && [[ ${1:-} =~ ^[a-z] ]]; then
        help=$("$build/${program#build/}" "$1" --help 2>&1) || fail "README.md:$line: $program has no command $1"
    else
        help=$("$build/${program#build/}" --help 2>&1)
    fi
    for word; do
        [[ $word != --* || $word == --help ]] || grep -qwF -e "$word" <<<"$help" ||
            fail "README.md:$line: $program has no option $word"
    done
}

spans=0
while IFS=: read -r line span; do
    read -ra words <<<"${span//\`/}"
    check_options "$line" "${words[@]}"
    spans=$((spans + 1))
done < <(awk '/^```/ { inside = !inside } { print inside ? "" : $0 }' README.md | grep -noE '`build/mesa[^`]*`')

# ---- blocks ----------------------------------------------------------------------------------------------------------

awk '
    /^```/ && !inside {
        inside = 1
        language = substr($0, 4)
        if (language != "sh" && language != "text") {
            print "README.md:" FNR ": a block that is marked neither sh nor text" >"/dev/stderr"
            exit 1
        }
        if (language == "sh") print "at " FNR
        next
    }
    /^```/ { inside = 0; next }
    inside && language == "sh"' README.md >"$work/commands" || fail "README.md is not well marked"
grep -q '^at ' "$work/commands" || fail "README.md holds no command"

free_port() {
    for _ in $(seq 100); do
        port=$((20000 + RANDOM % 12000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || return 0
    done
    fail "no free port"
}
free_port
# A busy machine, and a build with sanitizers, take longer to start than a reader waits.
sed -i "s/127\.0\.0\.1:8080/127.0.0.1:$port/g; s/--retry 60 /--retry 600 /" "$work/commands"
export MESA_LISTEN=127.0.0.1:$port MESA_URL=http://127.0.0.1:$port
free_port
export MASTER_PORT=$port

mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [ -f "$file" ] && printf '%s\0' "$file"
done | tar -c --null -T - | tar -x -C "$work/tree" || fail "the tree cannot be copied"
cd "$work/tree" || exit 1

# bash itself finds where a command begins: the trap sees every simple command, those in pipes and substitutions too.
cat >"$work/script" <<'END'
set -eETuo pipefail
shopt -s inherit_errexit
guard() { # COMMAND: the words of one simple command of the README
    local word
    [ "${#FUNCNAME[@]}" -gt "$depth" ] && return
    for word in $1; do
        [[ $word =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || break
    done
    [[ $known == *" $word "* || $word == at || $word =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] && return
    declare -F -- "$word" >/dev/null && return
    echo "FAIL: README.md: $word is not among the commands that tests/readme_test.sh knows" >&2
    : >"$unknown" # an exit alone is not seen when it happens inside "$(...)" among a command's words
    exit 1
}
at() { echo "---- README.md:$1"; }
deploy/quickstart.sh() { echo "not run here: deploy/quickstart.sh"; }
tests/run.sh() { echo "not run here: tests/run.sh"; }
ninja() {
    command ninja "$@" -n >/dev/null
    ln -sf "$programs"/mesa* "$2/"
}
depth=2
stop() { kill $(jobs -p) 2>/dev/null || true; } # what a failure left behind
trap stop EXIT
trap 'guard "$BASH_COMMAND"' DEBUG
END
cat "$work/commands" >>"$work/script"
known=$known unknown=$work/unknown programs=$build timeout 1500 bash "$work/script" ||
    fail "a command of README.md fails, see above"
[ ! -e "$work/unknown" ] || fail "a command of README.md is not known, see above"
echo "$(grep -c '^at ' "$work/commands") blocks ran, $spans commands in the text have known options"
