#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Golden models exported and read by transformers' own classes: no tensor missing or left over, the same logits.
build=${MESA_BUILD:-build}
source_dir=${MESA_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
shared=${MESA_SHARED:-$source_dir/../shared}
# shellcheck source=tests/clients/venv.sh
. "$source_dir/tests/clients/venv.sh"
[ -x "$build/mesa-trainer" ] || { echo "SKIP: $build/mesa-trainer is not built"; exit 77; }
[ -d "$shared/golden" ] || { echo "SKIP: $shared/golden is absent"; exit 77; }
find_python torch transformers safetensors || exit 77
OMP_NUM_THREADS=1 "$python" -B "$source_dir/tests/models/loaders.py" "$build/mesa-trainer" "$shared"
