#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What is installed, and the unit: systemd takes it, it is locked in, and its times and paths fit the server.
# shellcheck source=tests/shell.sh
. "$(dirname "$0")/../shell.sh"
need_built mesa mesa-server mesa-trainer

# ---- installation ----------------------------------------------------------------------------------------------------
# The whole tree need not be built for this test: only what it looks at is installed.
prefix=$folder/usr
mkdir -p "$folder/tree"
if ! cmake --install "$build" --prefix "$prefix" >"$folder/install.log" 2>&1; then
    if grep -q 'cannot find' "$folder/install.log"; then
        echo "SKIP: not everything that is installed is built: $(grep -m 1 'cannot find' "$folder/install.log")"
        exit 77
    fi
    cat "$folder/install.log"
    fail 'cmake --install fails'
fi
for file in bin/mesa bin/mesa-server bin/mesa-trainer lib/systemd/system/mesa-server.service lib/sysusers.d/mesa.conf \
    lib/tmpfiles.d/mesa.conf share/doc/mesa/mesa-server.conf.example share/man/man1/mesa.1 \
    share/man/man1/mesa-trainer.1 share/man/man8/mesa-server.8; do
    [ -s "$prefix/$file" ] || fail "$file is not installed"
done
"$prefix/bin/mesa-server" --version >/dev/null || fail 'the installed server does not run'

# The module for GPUs is found where this installation has it, which is not where the build was configured to go.
module=$prefix/$(sed -n 's/^CMAKE_INSTALL_LIBDIR:PATH=//p' "$build/CMakeCache.txt")/mesa/libmesa_kern_cuda.so
mkdir -p "$(dirname "$module")"
echo 'no shared object' >"$module"
looked=$(env -u MESA_LIBRARY_DIR "$prefix/bin/mesa-server" --device cuda:0 --listen "unix:$folder/socket" \
    --model "demo=$source_dir/deploy/models/demo" 2>&1 | grep -oE -m 1 '/[^ ]*libmesa_kern_cuda\.so')
[ "$(realpath "${looked:-/none}")" = "$(realpath "$module")" ] || fail "the module is looked for as ${looked:-nothing}"

# ---- the unit --------------------------------------------------------------------------------------------------------
unit=$prefix/lib/systemd/system/mesa-server.service
setting() { sed -nE "s/^$1=(.*)/\1/p" "$unit"; }

[[ $(setting ExecStart) == "$prefix/bin/mesa-server --config "* ]] || fail "ExecStart is $(setting ExecStart)"
grep -q '@' "$unit" && grep -n '@[A-Z_]*@' "$unit" && fail 'a place in the unit is not filled in'
drain=$("$build/mesa-server" --model x=/x --check-config | sed -n 's/^drain_time = //p')
[ "$(setting TimeoutStopSec)" -gt $((drain + 5)) ] || fail "TimeoutStopSec leaves no room beside drain_time $drain"
[ "$(setting ExecReload)" = "/bin/kill -HUP \$MAINPID" ] || fail "ExecReload is $(setting ExecReload)"
[ "$(setting Type)" = notify ] || fail 'Type is not notify'
# Just-in-time code of the matrix library.
grep -q '^MemoryDenyWriteExecute=yes' "$unit" && fail 'MemoryDenyWriteExecute would end the server'
# Every credential of the unit is a name that the example of the configuration uses, and the reverse.
grep -q '^LoadCredential=' "$unit" || fail 'no credential is seen in the unit'
diff <(sed -nE 's/^LoadCredential=([a-z-]+):.*/\1/p' "$unit" | sort) \
    <(grep -oE 'credential:[a-z-]+' "$source_dir/deploy/mesa-server.conf.example" | cut -d: -f2 | sort -u) ||
    fail 'the credentials of the unit and of the example differ'

if ! command -v systemd-analyze >/dev/null; then
    echo "SKIP verifying the unit: systemd-analyze is not installed"
    exit $((failures > 0))
fi
complaints=$(systemd-analyze verify --man=no "$unit" 2>&1 | grep -F mesa-server)
[ -z "$complaints" ] || fail "systemd-analyze verify: $complaints"
exposure=$(systemd-analyze security --offline=true "$unit" 2>/dev/null |
    sed -nE 's/.*exposure level.*: ([0-9.]+) .*/\1/p')
awk -v exposure="$exposure" 'BEGIN { exit !(exposure != "" && exposure < 2.0) }' ||
    fail "systemd-analyze security: exposure ${exposure:-unknown}, at most 2.0"
mkdir -p "$folder/root/etc"
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers --root="$folder/root" "$source_dir/deploy/sysusers.d/mesa.conf" || fail 'systemd-sysusers refuses'
    grep -q '^mesa:' "$folder/root/etc/group" || fail 'the group mesa is not made'
fi
if command -v systemd-tmpfiles >/dev/null; then
    systemd-tmpfiles --root="$folder/root" --create "$source_dir/deploy/tmpfiles.d/mesa.conf" ||
        fail 'systemd-tmpfiles refuses'
    [ "$(stat -c %a "$folder/root/etc/credstore")" = 700 ] || fail 'the folder of credentials is open to others'
    [ -d "$folder/root/srv/mesa/models" ] || fail 'the folder of models is not made'
fi

exit $((failures > 0))
