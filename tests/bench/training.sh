#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What comparisons of trained models share: learning rates searched, models trained once a seed, every one scored;
# sourced. What is done is not done again.
#
# The caller has set and exported TRAINER (mesa-trainer), DATA, OUT, DEVICE, EVALS ("NAME:CONTEXT ..." of DATA's
# shards), TASKS and ITEMS (of DATA's JSONL, and how many of each), BATCH_TOKENS; it has the lists models, rates and
# seeds, the number wider, the file config, and the function
#   variant MODEL NAME      the section of a sweep, under that name, that makes the model
# It calls set_all before anything runs. Before `search` and `train` it has set steps, or called choose_steps.

declare -a models rates seeds # as the caller has filled them
settings=()
config=${config:?the configuration of all runs} wider=${wider:?how often rates beyond are tried} steps=${steps:-}

# SECTION.KEY=VALUE...: of all runs, and those of SETTINGS, which win.
set_all() {
    local setting
    for setting in "$@" ${SETTINGS:-}; do settings+=(--set "$setting"); done
}

# STEPS FILE FOLDER [OPTION...]: the runs that FILE lists. A run that fails is a row of the table, and told.
sweep() {
    "$TRAINER" train --config "$config" --sweep "$2" --out "$3" --max-seconds "${MAX_SECONDS:-0}" \
        ${PARALLEL:+--parallel "$PARALLEL"} "${settings[@]}" --set train.steps="$1" \
        --set optim.warmup_steps="$((($1 + 9) / 10))" "${@:4}" ||
        echo "$(basename "$0"): not all runs of $3 ended well" >&2
}

newest() { # RUN: its last checkpoint
    printf '%s\n' "$1"/step-* | tail -n 1
}

is_done() { # RUN: it has ended as it should, its last checkpoint is there or not
    grep -qs '"end": *"done"' "$1/run.json"
}

number() { # KEY FILE: its last value
    grep -oE "\"$1\": ?[0-9.e+-]+" "$2" | tail -n 1 | sed 's/.*: *//'
}

# Every model alone for SPEED_STEPS (12), so that OUT/speed/MODEL tells its time.
speed() {
    local model
    for model in "${models[@]}"; do
        [ ! -e "$OUT/speed/$model/run.json" ] || continue
        variant "$model" "$model" >"$OUT/speed-$model.ini"
        sweep "${SPEED_STEPS:-12}" "$OUT/speed-$model.ini" "$OUT/speed" >&2
        rm -rf "$OUT/speed/$model"/step-*
    done
}

# QUARTERS DEFAULT: sets steps, once for a folder: STEPS, or as many as BUDGET seconds allow for so many quarters of a
# run of every model by what `speed` has measured.
choose_steps() {
    local model
    [ -e "$OUT/steps" ] || if [ -n "${BUDGET:-}" ]; then
        for model in "${models[@]}"; do number step_seconds "$OUT/speed/$model/log.jsonl"; done |
            awk -v budget="$BUDGET" -v quarters="$1" '
                { round += $1 } END { steps = int(4 * budget / (round * quarters)); print (steps > 20 ? steps : 20) }'
    else
        echo "${STEPS:-$2}"
    fi >"$OUT/steps"
    steps=$(cat "$OUT/steps")
}

# A line "LOSS RATE" a rate that was tried, the best first; the rate alone where there is no choice.
tried() { # MODEL
    local run rate
    [ ${#rates[@]} -gt 1 ] || { echo "- ${rates[0]}"; return; }
    for run in "$OUT/search/$1@"*; do
        rate=${run##*@}
        ! is_done "$run" || echo "$(number valid_loss "$run/run.json") ${rate%%,*}"
    done | sort -g
}

# Reads what `tried` prints: the rate that is to be tried besides, if the best is the least or the largest.
beyond() {
    awk '
        NR == 1 { best = least = most = $2 }
        { least = $2 < least ? $2 : least; most = $2 > most ? $2 : most }
        END { if (NR > 1 && best == most) print 2 * most; else if (NR > 1 && best == least) print least / 2 }'
}

add_rate() { # MODEL RATE: to the list, once
    grep -qx "\[variant $1@$2\]" "$list" || { variant "$1" "$1@$2"; echo "optim.lr = $2"; } >>"$list"
}

# Every rate on a quarter of the steps; while the best is the least or the largest tried, half or twice of it too.
search() {
    local model rate round list=$OUT/search.ini
    [ ${#rates[@]} -gt 1 ] || return 0
    [ -e "$list" ] || printf '[sweep]\nseeds = %s\n' "${seeds[0]}" >"$list"
    for model in "${models[@]}"; do
        for rate in "${rates[@]}"; do
            add_rate "$model" "$rate"
        done
    done
    for round in $(seq 0 "$wider"); do
        for model in "${models[@]}"; do
            rate=$([ "$round" = 0 ] || tried "$model" | beyond)
            [ -z "$rate" ] || [ "$(grep -c "^\[variant $model@" "$list")" -ge $((${#rates[@]} + wider)) ] ||
                add_rate "$model" "$rate"
        done
        sweep $(((steps + 3) / 4)) "$list" "$OUT/search" --set train.eval_every=$(((steps + 3) / 4))
        rm -rf "$OUT/search"/*/step-*
    done
}

# Every model at its best rate. OPTION...: of the runs.
train() {
    local model rate count list=$OUT/train.ini
    for count in $(seq "${first_seeds:-1}" "${#seeds[@]}"); do # each of every model before the next, should time end
        printf '[sweep]\nseeds = %s\n' "${seeds[*]:0:count}" >"$list"
        for model in "${models[@]}"; do
            rate=$(tried "$model" | head -n 1 | cut -d' ' -f2)
            [ -n "$rate" ] || { echo "$(basename "$0"): $model: no learning rate was found" >&2; continue; }
            { variant "$model" "$model"; echo "optim.lr = $rate"; } >>"$list"
        done
        sweep "$steps" "$list" "$OUT/train" "$@"
    done
}

# RUN: says what its last checkpoint is and scores, a file a part in OUT/eval; what else is said goes to RUN/eval.log.
eval_run() {
    local run=$1 name part checkpoint to tasks=()
    is_done "$run" || return 0
    exec >>"$run/eval.log"
    name=$(basename "$run")
    checkpoint=$(newest "$run") to=$OUT/eval/$name
    [ -e "$to.txt" ] || "$TRAINER" inspect "$checkpoint" --summary >"$to.txt"
    for part in $EVALS; do
        [ -e "$to-${part%:*}.json" ] || "$TRAINER" eval "$checkpoint" --data "$DATA/${part%:*}" --name "$name" \
            --context "${part#*:}" --batch-tokens "$BATCH_TOKENS" --device "$DEVICE" --out "$to-${part%:*}.json"
    done
    for part in $TASKS; do tasks+=(--task "$DATA/$part.jsonl"); done
    [ ${#tasks[@]} = 0 ] || [ -e "$to-tasks.json" ] || "$TRAINER" eval "$checkpoint" "${tasks[@]}" --limit "$ITEMS" \
        --name "$name" --batch-tokens "$BATCH_TOKENS" --device "$DEVICE" --out "$to-tasks.json"
}
export -f newest is_done eval_run

# READERS at once.
evaluate() {
    mkdir -p "$OUT/eval"
    printf '%s\0' "$OUT/train"/*,seed=* | xargs -0 -P "${READERS:-1}" -n 1 bash -euc 'eval_run "$@"' eval_run >&2
}
