#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# An untrained model: what init writes is the model that bench measures, can be served, and has a text for every id.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/../clients/server.sh"
need_built mesa-trainer
trainer=$build/mesa-trainer

expect 0 '/tiny: 116744 parameters, 512 ids$' '' "$trainer" init --random tiny --out "$folder/tiny"
expect 0 'parameters' '' "$trainer" inspect "$folder/tiny"
expect 2 '' 'huge.* is not 30m, s135, mesa-a, gdn-a or tiny' "$trainer" init --random huge --out "$folder/huge"
expect 2 '' '--random and --out are needed' "$trainer" init --random tiny
[ ! -e "$folder/huge" ] && [ ! -e "$folder/tiny/words.txt" ] || fail "something is left over"
# The vocabulary's merges were all found: a text for every id but the first, which is special.
[ "$(grep -c '": [0-9]*,\?$' "$folder/tiny/tokenizer.json")" -ge 512 ] || fail "fewer tokens than ids"
start_server --model "tiny=$folder/tiny" --device cpu
expect 0 '..' '' "$mesa" complete --model tiny --max-tokens 8 --ignore-eos --temperature 1 --seed 1 "abc"
exit $((failures > 0))
