#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Schemathesis over /openapi.json: what the document permits is answered as it says, what it forbids is refused, and no
# request gets a status, a header or a body that is not in it.
#
# Paths to states are left out: what their bytes are no schema says (server/sessions_test.sh).
#
# The server's limits are low, so that the largest requests that the document permits stay small. Seed and number of
# examples are fixed: the same requests every time.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
# shellcheck source=tests/clients/venv.sh
. "$(dirname "$0")/venv.sh"
need_python schemathesis schemathesis
give_template
start_server --listen 127.0.0.1:0 --max-tokens 4 --max-prompts 4 --max-prompt-tokens 4096 --max-body 256K
cd "$folder" || exit 1 # it writes beside itself
SCHEMATHESIS_HOOKS=openapi_hooks PYTHONPATH=$source_dir/tests/clients PYTHONDONTWRITEBYTECODE=1 \
    PYTHONWARNINGS=ignore timeout 1700 "$python" -m schemathesis.cli run "$address/openapi.json" --checks all \
    --exclude-path-regex '/state$' \
    --phases examples,coverage,fuzzing --max-examples "${MESA_EXAMPLES:-25}" --seed 1 --generation-database none \
    --request-timeout 120 --max-response-time 120 --suppress-health-check all --no-color --max-failures 20 \
    >"$folder/run" 2>&1
status=$?
if [ $status -ne 0 ]; then
    sed -n '/FAILURES/,$p' "$folder/run" | head -n 200
    grep -q FAILURES "$folder/run" || tail -n 30 "$folder/run"
    fail "status $status"
fi
kill -0 "$server" || fail 'the server is gone'
grep -E '^ +[0-9]+ generated' "$folder/run"
exit $((failures > 0))
