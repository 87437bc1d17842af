#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Holds the architecture: who may include whom, whose symbols are whose, what the libraries must not do, sizes, the map.
#
# Works on the tracked files (untracked ones too while they are not ignored) and on the archives in MESA_BUILD (default
# build). Every violation is one line "file:line: what"; the last line counts them. Symbols are only looked at in a
# build without sanitizers, which add their own. A rule that has an exception names it here, beside the rule.
set -uo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
build=${MESA_BUILD:-build}
if ! git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    echo "SKIP: git does not list the files of this folder"
    exit 77
fi

files() {
    git ls-files --cached --others --exclude-standard -- "$@" | while read -r file; do
        [ -f "$file" ] && echo "$file"
    done
}
mapfile -t sources < <(files '*.c' '*.h' '*.cu' '*.cuh')
if [ ${#sources[@]} -eq 0 ]; then
    echo "tests/layers.sh:1: no source file found"
    exit 1
fi

# ---- source text: headers, includes, forbidden calls, sizes ----------------------------------------------------------

check_sources() {
    awk '
    BEGIN { ENDING = "printf|vprintf|puts|putchar|perror|exit|_exit|_Exit|quick_exit|abort|assert" }
    function report(line, what) { print FILENAME ":" line ": " what }

    # Folders that a file of the project may include from. Tests may include anything, nothing includes tests.
    function project_allowed(file, header) {
        if (file ~ /^tests\//) return 1
        if (header ~ /^tests\//) return 0
        if (file ~ /^kernels\//) return header ~ /^kernels\//
        if (file == "engine/status.h") return 0
        if (file == "engine/engine.h") return header == "engine/status.h"
        if (file ~ /^engine\//) return header ~ /^engine\// || header == "kernels/kernels.h"
        if (file ~ /^server\//) return header ~ /^server\// || header ~ /^engine\/(engine|status)\.h$/
        if (file ~ /^trainer\//)
            return header ~ /^trainer\// || header == "kernels/kernels.h" ||
                   (header ~ /^engine\// && header != "engine/store.h")
        if (file ~ /^clients\//) return header ~ /^clients\//
        return 0
    }

    # Libraries that stay behind one door.
    function library_allowed(file, header) {
        if (file ~ /^tests\//) return 1
        if (header ~ /^(cuda|cublas|nccl|nvrtc|cudnn|mma|cooperative_groups)/) return file ~ /^kernels\/cuda\//
        if (header ~ /^(dnnl|oneapi)/ || header == "omp.h" || header ~ /intrin\.h$/ || header == "arm_neon.h")
            return file ~ /^kernels\/cpu\//
        if (header == "jansson.h")
            return file ~ /^server\/(request|response)[a-z_]*\.[ch]$/ || file == "trainer/jsonl.c" ||
                   file ~ /^clients\// ||
                   file ~ /^engine\/(json|config|checkpoint|safetensors|tokenizer)[a-z_]*\.[ch]$/
        if (header == "microhttpd.h") return file ~ /^server\/http[a-z_]*\.[ch]$/
        if (header == "uv.h") return file ~ /^server\/loop[a-z_]*\.[ch]$/
        if (header ~ /^systemd\//) return file ~ /^server\//
        if (header == "ini.h") return file ~ /^(server|trainer)\//
        if (header ~ /^curl\//) return file ~ /^clients\//
        if (header ~ /^(lmdb|hiredis)/) return file ~ /^engine\/store[a-z_]*\.[ch]$/
        if (header ~ /^(pcre2|utf8proc)/) return file ~ /^engine\//
        if (header == "check.h") return 0
        return 1
    }

    # The line without comments and string contents.
    function code_of(text,    out) {
        gsub(/\\./, "", text)
        gsub(/"[^"]*"/, "\"\"", text)
        out = ""
        while (text != "") {
            if (in_comment) {
                if (!match(text, /\*\//)) return out
                text = substr(text, RSTART + 2)
                in_comment = 0
            } else if (match(text, /\/[*\/]/)) {
                out = out substr(text, 1, RSTART - 1)
                if (substr(text, RSTART, 2) == "//") return out
                text = substr(text, RSTART + 2)
                in_comment = 1
            } else
                return out text
        }
        return out
    }

    function end_file() {
        if (previous == "") return
        if (lines > 800) print previous ":" lines ": file of " lines " lines (limit 800)"
        if (design < 2) print previous ":2: design comment of " design " lines after the licence (at least 2)"
    }

    FNR == 1 {
        end_file()
        previous = FILENAME
        in_comment = body = start = design = 0
        heading = 1
        if ($0 != "// SPDX-License-Identifier: Apache-2.0") report(1, "first line is not the SPDX licence line")
        is_library = FILENAME ~ /^(kernels|engine)\//
        limit = FILENAME ~ /^kernels\// ? 120 : 80
    }
    { lines = FNR }
    FNR > 1 && heading { if ($0 ~ /^\/\/ ./) design++; else if ($0 !~ /^\/\/$/) heading = 0 }
    length($0) > 120 { report(FNR, "line of " length($0) " columns (limit 120)") }
    /[ \t]$/ { report(FNR, "space at the end of the line") }
    /\t/ { report(FNR, "tab") }
    /TODO|FIXME|(^|[^X])XXX([^X]|$)/ { report(FNR, "unfinished: " $0) }

    /^[ ]*#[ ]*include/ {
        header = $0
        if (header ~ /</) {
            sub(/^[^<]*</, "", header); sub(/>.*/, "", header)
            if (header ~ /^(kernels|engine|server|trainer|clients|tests)\//)
                report(FNR, "project header in angle brackets: " header)
            else if (!library_allowed(FILENAME, header)) report(FNR, "may not include <" header ">")
        } else if (header ~ /"/) {
            sub(/^[^"]*"/, "", header); sub(/".*/, "", header)
            if (header !~ /^(kernels|engine|server|trainer|clients|tests)\//)
                report(FNR, "project includes are written from the root: \"" header "\"")
            else if (!project_allowed(FILENAME, header)) report(FNR, "may not include \"" header "\"")
        }
        next
    }

    { code = code_of($0) }
    is_library && code ~ "(^|[^A-Za-z0-9_])(" ENDING ")[ ]*\\(" {
        report(FNR, "a library neither prints nor ends the program:" code)
    }
    is_library && code ~ /(^|[^A-Za-z0-9_])(stdout|stderr)([^A-Za-z0-9_]|$)/ {
        report(FNR, "a library does not touch the standard streams:" code)
    }
    is_library && code ~ /(^|[^A-Za-z0-9_])(pthread_create|thrd_create|fork)[ ]*\(/ {
        report(FNR, "a library starts no thread and no process:" code)
    }
    is_library && code ~ /(^|[^A-Za-z0-9_])getenv[ ]*\(/ && $0 !~ /getenv\("MESA_[A-Z_]*"\)/ {
        report(FNR, "a library reads no environment but MESA_*:" code)
    }

    # A function: a column-0 line that opens a parameter list, until the brace in column 0.
    !body && code ~ /^[A-Za-z_].*\(/ && code !~ /;[ ]*$/ { start = FNR; name = code }
    !body && start && code ~ /;[ ]*$/ { start = 0 }
    !body && start && code ~ /\{[ ]*$/ && code !~ /=[ ]*\{/ { body = 1 }
    body && /^}/ {
        if (FNR - start + 1 > limit) {
            sub(/\(.*/, "", name)
            report(start, "function of " FNR - start + 1 " lines (limit " limit "): " name)
        }
        body = start = 0
    }
    END { end_file() }
    ' "$@"
}

# ---- archives: prefixes and mutable globals --------------------------------------------------------------------------

# ARCHIVE FOLDER PREFIX: symbols that other objects can see carry the prefix; nothing of the program changes behind a
# function's back. A flag that a signal handler sets (volatile sig_atomic_t) is the one mutable global there may be.
check_archive() {
    local archive=$1 folder=$2 prefix=$3
    [ -n "$(files "$folder/*.c" | grep -v /main.c)" ] || return 0
    if [ ! -f "$archive" ]; then
        echo "$folder:1: $archive is not built"
        return 0
    fi
    nm -l --defined-only --format=sysv "$archive" 2>/dev/null |
        awk -F'|' -v prefix="$prefix" -v root="$PWD/" -v archive="$archive" '
        function place(text) {
            sub(/^[^\t]*\t/, "", text)
            return index(text, root) == 1 ? substr(text, length(root) + 1) : ""
        }
        NF >= 7 {
            name = $1; type = $3; section = $7
            gsub(/ /, "", name); gsub(/ /, "", type)
            where = section ~ /\t/ ? place(section) : ""
            sub(/\t.*/, "", section); gsub(/ /, "", section)
            if (where == "") where = archive ":0"
            if (name ~ /^(__|\.|_GLOBAL_|DW\.)/) next
            if (type ~ /^[A-Z]$/ && type != "U" && name !~ "^" prefix)
                print where ": symbol " name " lacks the prefix " prefix
            if (section ~ /^(\.data|\.bss|\.tdata|\.tbss|COMMON|\*COM\*)/ && section !~ /^\.data\.rel\.ro/)
                print where ": mutable global " name
        }' | sort -u | while IFS= read -r line; do
        if [[ $line == *": mutable global "* ]]; then
            local name=${line##* }
            grep -qE "sig_atomic_t +${name%%.*}\b" "$folder"/*.c 2>/dev/null && continue
        fi
        echo "$line"
    done
}

check_symbols() {
    if grep -q '^SANITIZE:STRING=.\+' "$build/CMakeCache.txt" 2>/dev/null; then
        return 0
    fi
    check_archive "$build/libkernels.a" kernels/cpu kern_
    check_archive "$build/libkernels_ref.a" kernels/ref kern_ref_
    check_archive "$build/libengine.a" engine eng_
    check_archive "$build/libserver_core.a" server srv_
    check_archive "$build/libtrainer_core.a" trainer trn_
}

# ---- lists that must agree -------------------------------------------------------------------------------------------

check_exports() {
    local declared listed
    declared=$(sed -nE 's/^ENG_EXPORT .*[ *](eng_[a-z0-9_]+)\(.*/\1/p' engine/engine.h engine/status.h | sort -u)
    listed=$(sed -nE 's/^ *(eng_[a-z0-9_]+);$/\1/p' engine/mesalm.map | sort -u)
    comm -3 <(echo "$declared") <(echo "$listed") | while read -r name; do
        echo "engine/mesalm.map:1: $name is not both marked ENG_EXPORT and listed"
    done
}

# Every file is named in README.md, or in the README.md of its top folder (there also without that folder's name).
# Data may be covered by the name of a folder below the top one ("data/"); sources and scripts are named one by one.
check_map() {
    local document top word path parent
    local -A named=()
    while read -r document; do
        [[ $document == */*/* ]] && continue
        top=${document%README.md}
        while read -r word; do
            named[$top$word]=1
            [[ $word == "$top"* ]] && named[$word]=1
        done < <(grep -oE '[A-Za-z0-9_.][A-Za-z0-9_./-]+' "$document" | sed 's/\.$//')
        while IFS=: read -r line word; do
            word=${word//\`/}
            [ -e "$word" ] || [ -e "$top$word" ] || echo "$document:$line: names $word, which is not there"
        done < <(grep -noE '`[a-z0-9_./-]+\.(c|h|cu|cuh|sh|py)`' "$document")
    done < <(files README.md '*/README.md')
    while read -r path; do
        [ -n "${named[$path]:-}" ] && continue
        parent=$path
        if [[ $path != *.[ch] && $path != *.cu && $path != *.cuh && $path != *.sh && $path != *.py ]]; then
            while [[ $parent == */*/* ]]; do
                parent=${parent%/*}
                [ -n "${named[$parent/]:-}" ] && continue 2
            done
        fi
        top=${path%%/*}/
        [[ $path == */* ]] || top=
        echo "$path:1: not named in ${top:+README.md or $top}README.md"
    done < <(files | grep -v '\(^\|/\)README\.md$')
}

check_scripts() {
    files '*.sh' .ci/run | while read -r file; do
        head -n 1 "$file" | grep -q '^#!' || echo "$file:1: no interpreter line"
        sed -n 2p "$file" | grep -q '^# SPDX-License-Identifier: Apache-2.0$' || echo "$file:2: no SPDX licence line"
        awk 'length($0) > 120 { print FILENAME ":" FNR ": line of " length($0) " columns (limit 120)" }' "$file"
    done
}

violations=$(
    check_sources "${sources[@]}"
    check_symbols
    check_exports
    check_map
    check_scripts
)
if [ -n "$violations" ]; then
    echo "$violations"
    echo "layers: $(wc -l <<<"$violations") violations in ${#sources[@]} files"
    exit 1
fi
echo "layers: ${#sources[@]} files keep the rules"
