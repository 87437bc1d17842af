#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The installed service under a systemd of its own: a container whose root lies over this machine's, booted, with no
# network but its loopback. What deploy/README.md says is done there as root, step by step.
set -uo pipefail
source_dir=${MESA_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
build=${MESA_BUILD:-$source_dir/build}
skip() {
    echo "SKIP: $1"
    exit 77
}
[ "$(id -u)" = 0 ] || skip 'a container is booted by root alone'
for program in systemd-nspawn systemctl nsenter setpriv; do
    command -v $program >/dev/null || skip "$program is not installed"
done
grep -q '^SANITIZE:STRING=.' "$build/CMakeCache.txt" && skip "sanitizers do not live with the unit's filters"

folder=$(mktemp -d)
root=$folder/root
mkdir "$folder/upper" "$folder/work" "$root"
container=
find_leader() { # the container's first process
    leader=$(pgrep -P "$container" | head -n 1)
    [ -n "$leader" ]
}
# Nothing in the container is worth an orderly end, which a unit may hold up: without its first process all of it is
# gone, and systemd-nspawn tidies up.
leave() {
    trap '' INT TERM
    if [ -n "$container" ]; then
        if find_leader; then kill -KILL "$leader"; else kill "$container"; fi 2>/dev/null
        wait "$container" 2>/dev/null
    fi
    umount -l "$root" 2>/dev/null
    rm -rf "$folder"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root" 2>/dev/null ||
    skip 'no overlay can be mounted here'

# ---- installation ----------------------------------------------------------------------------------------------------
DESTDIR=$root cmake --install "$build" --prefix /usr >"$folder/install.log" 2>&1 ||
    skip "not everything is built: $(grep -m 1 'cannot find' "$folder/install.log")"
mkdir -p "$root/srv/mesa/models"
cp -r "$source_dir/deploy/models/demo" "$root/srv/mesa/models/"
rm -rf "$root/etc/mesa" "$root/var/lib/mesa-server" "$root/var/lib/private/mesa-server" "$root/etc/credstore"

systemd-nspawn -D "$root" -b --machine="mesa-test-$$" --register=no --keep-unit --link-journal=no --private-network \
    --console=pipe >"$folder/boot.log" 2>&1 </dev/null &
container=$!
is_up() {
    find_leader && nsenter -t "$leader" -a systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded'
}
for _ in $(seq 120); do
    is_up && break
    kill -0 "$container" 2>/dev/null || skip "no container boots here: $(tail -n 1 "$folder/boot.log")"
    sleep 0.25
done
is_up || skip "systemd is not up after 30 s: $(tail -n 1 "$folder/boot.log")"

# ---- in the container ------------------------------------------------------------------------------------------------
cat >"$root/root/service.sh" <<'END'
failures=0
fail() {
    echo "FAIL: $1"
    journalctl -u mesa-server -n 12 --no-pager -o cat | sed 's/^/    /'
    failures=$((failures + 1))
}
conf=/etc/mesa/mesa-server.conf
said() { mesa complete --session "$id" --session-rollback --max-tokens 8 --temperature 0 ''; }
property() { systemctl show -P "$1" mesa-server; }
goes_on() {
    [ "$(said)" = "$text" ] || fail "the session does not go on $1"
}
# Answers count from when the service is there again.
comes_back() {
    for _ in $(seq 240); do
        [ "$(property MainPID)" != "$1" ] && systemctl -q is-active mesa-server && return
        sleep 0.25
    done
    fail "the service does not come back: $(property ActiveState)"
}

systemd-sysusers && systemd-tmpfiles --create || fail 'users and folders are not made'
cp /usr/share/doc/mesa/mesa-server.conf.example $conf
systemctl daemon-reload
systemctl enable --now mesa-server 2>/dev/null || fail 'the service does not start'
user=$(ps -o user:32= -p "$(property MainPID)")
[ "$user" = mesa-server ] || fail "the service runs as $user"
id=$(mesa session create 'Once upon a time')
text=$(said)
[ -n "$text" ] || fail 'no text comes'

# A reload takes what is new; what is wrong changes nothing, and the status says what.
cp -r /srv/mesa/models/demo /srv/mesa/models/second
echo 'model = second=/srv/mesa/models/second' >>$conf
pid=$(property MainPID)
systemctl reload mesa-server || fail 'reload fails'
curl -fsS http://127.0.0.1:8080/v1/models | grep -q '"id":"second"' || fail 'a second model is not served'
goes_on 'after a reload'
echo 'nonsense = 1' >>$conf
systemctl reload mesa-server
systemctl -q is-active mesa-server || fail 'a wrong configuration ends the service'
property StatusText | grep -q '^Not reloaded: .*unknown key nonsense' || fail "the status is: $(property StatusText)"
goes_on 'after a reload that was refused'
sed -i '/nonsense/d' $conf
systemctl reload mesa-server
[ -z "$(property StatusText)" ] || fail "the status is still: $(property StatusText)"
[ "$(property MainPID)" = "$pid" ] || fail 'a reload is a restart'

# Sessions outlive the process, however it ends.
systemctl restart mesa-server || fail 'restart fails'
goes_on 'after a restart'
for _ in $(seq 240); do
    mesa session show "$id" | grep -qE '^durable +true$' && break
    sleep 0.25
done
pid=$(property MainPID)
systemctl kill -s KILL mesa-server
comes_back "$pid"
goes_on 'after a kill'

# Keys come as a credential, and the local socket is for the group.
umask 077
key=$(openssl rand -hex 32)
echo "me $(echo "$key" | mesa-server --hash-key)" >/etc/credstore/mesa-server.keys
sed -i -E 's/^[;#](keys = credential:keys)$/\1/; s,^#listen = .*,listen = unix:/run/mesa-server/socket,' $conf
umask 022
systemctl restart mesa-server || fail 'it does not start with a key'
status_of() {
    setpriv --reuid nobody --regid "$1" --clear-groups curl -s -o /dev/null -w '%{http_code}' \
        --unix-socket /run/mesa-server/socket -H "Authorization: Bearer $2" http://localhost/v1/models
}
[ "$(status_of mesa "$key")" = 200 ] || fail "a member with the key gets $(status_of mesa "$key")"
[ "$(status_of mesa none)" = 401 ] || fail "a member with another key gets $(status_of mesa none)"
[ "$(status_of nogroup "$key")" = 000 ] || fail "no member, and gets $(status_of nogroup "$key")"

# Ended as asked; a wrong configuration is not tried again.
systemctl stop mesa-server
[ "$(property Result)" = success ] || fail "stopping ends with $(property Result)"
echo 'nonsense = 1' >>$conf
systemctl start mesa-server 2>/dev/null && fail 'a wrong configuration starts'
[ "$(property ActiveState) $(property ExecMainStatus) $(property NRestarts)" = 'failed 2 0' ] ||
    fail "a wrong configuration: $(property ActiveState), status $(property ExecMainStatus)"
exit $((failures > 0))
END
# Behind the shell, which would hear of no signal while it waited for a program.
nsenter -t "$leader" -a timeout 300 bash /root/service.sh &
wait $!
