#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A quantised model: what quantize tells of it, that it is scored and served as it is, and that it goes back to floats.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
trainer=$build/mesa-trainer
demo=$source_dir/deploy/models/demo
need_built mesa-trainer

head -c 6000 "$source_dir/README.md" >"$folder/readme" # enough for a loss; it is taken of three models, twice
expect 0 'documents' '' "$trainer" pack --tokenizer "$demo" --out "$folder/text" "$folder/readme"
for bits in 8 4; do
    expect 0 '^loss [0-9.]+ before, [0-9.]+ after: [+-][0-9.]+ nats' '' "$trainer" quantize "$demo" \
        --out "$folder/q$bits" --bits "$bits" --data "$folder/text"
    cp "$folder/out" "$folder/q$bits.txt"
done

# The error of a kind of matrix, and what the loss gains: both small, and smaller for more bits.
told() { # BITS PATTERN COLUMN
    awk -v pattern="$2" -v column="$3" '$0 ~ pattern { print $column }' "$folder/q$1.txt"
}
holds() {
    awk "BEGIN { exit !($1) }" || fail "not so: $1"
}
kinds=$(grep -c '^\(attn\|mlp\|model\)\.' "$folder/q8.txt")
[ "$kinds" -eq 8 ] || fail "$kinds kinds of matrices, want 8"
holds "$(told 8 '^all ' 4) < 0.006 && $(told 4 '^all ' 4) < 0.09 && $(told 4 "^mlp.up" 4) > 0.04"
for bits in 8 4; do
    holds "$(told $bits '^loss' 2) == $(told 8 '^loss' 2)"
    holds "$(told $bits '^loss' 4) - $(told $bits '^loss' 2) < ($bits == 8 ? 0.01 : 0.1)"
done

size() {
    stat -c %s "$1/model.safetensors"
}
holds "$(size "$folder/q8") < 0.6 * $(size "$demo") && $(size "$folder/q4") < 0.4 * $(size "$demo")"

# The loss is that of the folder as anybody scores it.
expect 0 "^loss  *$(told 8 '^loss' 4 | cut -c 1-6)" '' "$trainer" eval "$folder/q8" --data "$folder/text"
expect 0 'parameters in F32' '' "$trainer" export "$folder/q8" --out "$folder/floats"
expect 0 'F32' '' "$trainer" inspect "$folder/floats"
expect 2 '' '--bits: 8 or 4' "$trainer" quantize "$demo" --out "$folder/q3" --bits 3
expect 2 '' '--out is needed' "$trainer" quantize "$demo"
[ ! -e "$folder/q3" ] || fail "something is left over"

start_server --model "q8=$folder/q8" --model "q4=$folder/q4" --device cpu
for model in q8 q4; do
    expect 0 '..' '' "$mesa" complete --model "$model" --max-tokens 24 --temperature 0 "Once upon a time"
done
exit $((failures > 0))
