#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Configs that differ from the golden models against the reference in float64: a selection that has every mixer.
#
# Everything: tests/models/variations_test.sh --all (minutes); or some cases by name.
build=${MESA_BUILD:-build}
source_dir=${MESA_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
shared=${MESA_SHARED:-$source_dir/../shared}
# shellcheck source=tests/clients/venv.sh
. "$source_dir/tests/clients/venv.sh"
[ -x "$build/mesa-trainer" ] || { echo "SKIP: $build/mesa-trainer is not built"; exit 77; }
[ -r "$shared/golden/ref_models.py" ] || { echo "SKIP: $shared/golden/ref_models.py is absent"; exit 77; }
need_python numpy numpy
# Small models: a second thread costs more than it gains.
OMP_NUM_THREADS=1 "$python" -B "$source_dir/tests/models/compare.py" "$build/mesa-trainer" "$shared" "$@"
