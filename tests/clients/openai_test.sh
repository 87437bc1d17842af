#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# OpenAI's own Python client and LangChain's against the real server.
# shellcheck source=tests/clients/server.sh
. "$(dirname "$0")/server.sh"
# shellcheck source=tests/clients/venv.sh
. "$(dirname "$0")/venv.sh"
need_python openai openai langchain_openai
give_template
start_server --listen 127.0.0.1:0
"$python" "$source_dir/tests/clients/openai_client.py" "$address/v1" || fail 'see above'
exit $((failures > 0))
