#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The manual pages: every option of --help with its value's name, no other, and no warning when they are set.
#
# A page's options are the .B, .BI and .BR lines after .TP in its section or subsection; both sides are compared as
# lists of "--name VALUE". A section with no option on either side is a failure: then one of the readers here is blind.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa mesa-server mesa-trainer
pages=$source_dir/deploy/man

documented() { # PAGE HEADING...: the options below these headings
    local page=$1
    shift
    for heading; do
        awk -v heading="$heading" '
        /^\.S[HS] / {
            title = substr($0, 5)
            gsub(/"/, "", title)
            inside = title == heading
        }
        inside && tag && /^\.B[IR]? \\-\\-/ {
            gsub(/\\-/, "-")
            sub(/^\.B[IR]? /, "")
            sub(/ *", " *-h$/, "")
            gsub(/"/, "")
            gsub(/  +/, " ")
            sub(/ $/, "")
            print
        }
        { tag = /^\.TP/ }' "$pages/$page"
    done | sort
}

mentioned() { # PAGE HEADING: the options that its text names
    awk -v heading="$2" '
        /^\.S[HS] / { inside = substr($0, 5) == heading }
        inside && !tag && /^\.BR? \\-\\-/ {
            gsub(/\\-/, "-")
            print $2
        }
        { tag = /^\.TP/ }' "$pages/$1"
}

told() { # COMMAND...: what its --help lists
    timeout 300 "$@" --help | sed -nE \
        -e 's/^  (--[a-z-]+), -h .*/\1/p' \
        -e 's/^  (--[a-z-]+) ([^ ]+)( .*|$)/\1 \2/p' \
        -e 's/^  (--[a-z-]+)  .*/\1/p' | sort
}

common() { # COUNT: the lines that occur COUNT times
    sort | uniq -c | sed -nE "s/^ *$1 //p"
}

compare() { # NAME DOCUMENTED TOLD
    if [ -z "$2" ] && [ -z "$3" ]; then
        fail "$1: no option is seen, neither in the manual nor in --help"
    elif [ "$2" != "$3" ]; then
        fail "$1: the manual (<) and --help (>) differ"
        diff <(echo "$2") <(echo "$3")
    fi
}

compare mesa-server "$(documented mesa-server.8 OPTIONS)" "$(told "$build/mesa-server")"
fields='Fields of the request'
compare 'mesa complete' "$(documented mesa.1 complete "$fields")" "$(told "$build/mesa" complete)"
# Which of the fields a command has no use for, or has a use for alone, its text says.
all=$(documented mesa.1 "$fields")
these() { # OPTION...: as an extended regular expression
    echo "^($(paste -sd'|' <<<"$1"))( |\$)"
}
compare 'mesa chat' "$({ documented mesa.1 chat; grep -vE "$(these "$(mentioned mesa.1 chat)")" <<<"$all"; } | sort)" \
    "$(told "$build/mesa" chat)"
taken=$(mentioned mesa.1 session | grep -vx -e --session)
compare 'mesa session' "$({ documented mesa.1 session; grep -E "$(these "$taken")" <<<"$all"; } | sort)" \
    "$(told "$build/mesa" session)"
compare 'mesa models' "$(documented mesa.1 models)" "$(told "$build/mesa" models)"
# bench has options of its own for a few of the fields.
own=$(documented mesa.1 bench | cut -d' ' -f1)
compare 'mesa bench' \
    "$({ documented mesa.1 bench; documented mesa.1 "$fields" | grep -vwF -e "$own"; } | sort)" \
    "$(told "$build/mesa" bench)"

commands() { # PROGRAM: the commands that its --help lists
    "$build/$1" --help | sed -nE 's/^  ([a-z][a-z-]*) +.*/\1/p' | sort
}
sections() { # PAGE: subsections of COMMANDS
    awk '/^\.SH/ { inside = $2 == "COMMANDS" } inside && /^\.SS [a-z]/ { print $2 }' "$pages/$1" | sort
}
compare 'commands of mesa' "$(sections mesa.1)" "$(commands mesa)"
compare 'commands of mesa-trainer' "$(sections mesa-trainer.1)" "$(commands mesa-trainer)"
# Tasks have options of their own; the page tells what they have in common.
tasks=$("$build/mesa-trainer" task --help | sed -nE 's/^  ([a-z][a-z-]*)$/\1/p')
compare 'mesa-trainer task NAME' "$(documented mesa-trainer.1 task)" \
    "$(for task in $tasks; do told "$build/mesa-trainer" task "$task"; done | common "$(wc -w <<<"$tasks")")"
for command in $(commands mesa-trainer | grep -vx task); do
    compare "mesa-trainer $command" "$(documented mesa-trainer.1 "$command")" "$(told "$build/mesa-trainer" "$command")"
done

# Exit statuses that a page lists are the ones that --help tells.
for status in 0 1 2 3 4; do
    grep -qE "^\.B $status\$" "$pages/mesa-server.8" || fail "mesa-server.8: exit status $status is missing"
done
for status in 0 1 2 3 130; do
    grep -qE "^\.B $status\$" "$pages/mesa.1" || fail "mesa.1: exit status $status is missing"
done

if command -v groff >/dev/null; then
    for page in "$pages"/*.[18]; do
        warnings=$(groff -man -Tutf8 -ww -z "$page" 2>&1)
        [ -z "$warnings" ] || fail "$page: $warnings"
    done
else
    echo "SKIP setting the pages: groff is not installed"
fi

exit $((failures > 0))
