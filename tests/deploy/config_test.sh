#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# deploy/mesa-server.conf.example: it is a configuration, names every key once, and its defaults are the server's.
#
# "#key = VALUE" is a default and ";key = VALUE" an example of a key that has none. The defaults are put in force and
# the printed configuration must be the one that no file gives.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa-server
server=$build/mesa-server
example=$source_dir/deploy/mesa-server.conf.example
while read -r variable; do
    unset "$variable"
done < <(compgen -e MESA_ | grep -vE '^MESA_(BUILD|SOURCE|SHARED|CPU_ISA)$')

keys() { # FIRST-CHARACTER
    sed -nE "s/^$1([a-z_]+) = .*/\1/p" "$example" | sort
}
value_of() { sed -nE "s/^#$1 = (.*)/\1/p" "$example"; }

# As it stands.
"$server" --config "$example" --check-config >"$folder/as-is" || fail 'the example is no configuration'
"$server" --model demo=/srv/mesa/models/demo --check-config >"$folder/wanted"
cmp -s "$folder/as-is" "$folder/wanted" || fail 'the example sets something beside the model'

# With every default written out.
sed -E 's/^#([a-z_]+ = )/\1/' "$example" >"$folder/defaults.conf"
if "$server" --config "$folder/defaults.conf" --check-config >"$folder/got"; then
    diff "$folder/wanted" "$folder/got" || fail 'the defaults of the example (>) are not the server'\''s (<)'
else
    fail 'the defaults of the example are no configuration'
fi
# The words of --help agree as well: sizes are written as there.
help=$("$server" --help | tr '\n' ' ' | tr -s ' ')
for key in $(keys '#'); do
    rest=${help#*"--${key//_/-} "}
    rest=${rest%% --*}
    [[ $rest == *"(default $(value_of "$key"))"* ]] || fail "$key: --help tells another default: $rest"
done

# Every option is a key of the example, and every key an option.
"$server" --help | sed -nE 's/^  --([a-z-]+) [^ ].*/\1/p' | tr - _ | grep -vxE 'config|help' | sort >"$folder/options"
{ keys '#'; keys ';'; keys ''; } | sort >"$folder/keys"
diff "$folder/options" "$folder/keys" || fail 'the options (<) and the keys of the example (>) differ'
# A key with a default is shown as one.
for key in $(keys ';'); do
    rest=${help#*"--${key//_/-} "}
    [[ ${rest%% --*} == *"(default "* ]] && fail "$key: has a default, but is written as a key without"
done

# The examples of keys without a default are values that the server takes.
mkdir "$folder/credentials"
printf 'somebody %s\n' "$(printf 'x%.0s' $(seq 64) | "$server" --hash-key)" >"$folder/credentials/keys"
sed -E 's/^;(keys|admin_listen) = /\1 = /' "$example" >"$folder/keys.conf"
CREDENTIALS_DIRECTORY=$folder/credentials "$server" --config "$folder/keys.conf" --check-config >"$folder/got" ||
    fail 'the examples of keys and admin_listen are not taken'
[ "$(grep -cE '^(keys|admin_listen) = ' "$folder/got")" -eq 2 ] || fail 'keys and admin_listen are not in force'

exit $((failures > 0))
