#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# logits --at: what is seen after so many ids does not depend on what follows or on other places, and is the row that
# logits writes without it.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
trainer=$build/mesa-trainer

vocabulary=512
# The bytes of the first tensor of a file from row $2 on, one row.
row() {
    local head
    head=$(od -An -tu8 -N8 "$1" | tr -d ' ')
    tail -c +$((1 + 8 + head + $2 * vocabulary * 4)) "$1" | head -c $((vocabulary * 4))
}
"$trainer" init --random tiny --out "$folder/tiny" > /dev/null || fail "no model"
for split in 0 2; do
    options=(logits "$folder/tiny" --split "$split")
    expect 0 'after 5 ids at 2 places' '' "$trainer" "${options[@]}" --tokens 9,8,7,6,5,4,3 --at 2,5 --out "$folder/two"
    expect 0 'after 5 ids at 1 places' '' "$trainer" "${options[@]}" --tokens 9,8,7,6,5 --at 5 --out "$folder/one"
    expect 0 '5 ids' '' "$trainer" "${options[@]}" --tokens 9,8,7,6,5 --out "$folder/all"
    cmp <(row "$folder/two" 1) <(row "$folder/one" 0) || fail "split $split: another place changed the logits"
    cmp <(row "$folder/two" 0) <(row "$folder/all" 1) || fail "split $split: not the second row"
    cmp <(row "$folder/two" 1) <(row "$folder/all" 4) || fail "split $split: not the fifth row"
    [ "$(row "$folder/one" 0 | wc -c)" -eq $((vocabulary * 4)) ] || fail "split $split: no row"
    state=$(($(stat -c %s "$folder/one") - $(od -An -tu8 -N8 "$folder/one") - 8 - vocabulary * 4))
    cmp <(tail -c "$state" "$folder/two") <(tail -c "$state" "$folder/one") || fail "split $split: another state"
done
expect 2 '' '--at: 2: not an ascending number of ids up to the 3 given' "$trainer" logits "$folder/tiny" \
    --tokens 1,2,3 --at 3,2 --out "$folder/none"
expect 2 '' '--at: 4: not an ascending' "$trainer" logits "$folder/tiny" --tokens 1,2,3 --at 4 --out "$folder/none"
expect 2 '' '--at: 2: inside the prompt a state is seen every' "$trainer" logits "$folder/tiny" --tokens 1,2,3 --at 2 \
    --out "$folder/none"
expect 2 '' '--at: without --grads and --lines' "$trainer" logits "$folder/tiny" --tokens 1,2 --at 1 --grads \
    --out "$folder/none"
exit $((failures > 0))
