#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building, testing and trying mesa needs, on Debian 12 and Ubuntu 24.04 (root, or a user with sudo).
#
# Only packages of the distribution; nothing is asked when all are there. A CUDA toolkit is not installed: it comes from
# NVIDIA's repository and is looked for by the build. Further package names may follow as arguments.
set -euo pipefail

packages=(
    build-essential cmake ninja-build pkg-config ccache git
    check curl jq
    libcurl4-gnutls-dev
    libdnnl-dev
    libgnutls28-dev
    libhiredis-dev
    libinih-dev
    libjansson-dev
    liblmdb-dev
    libmicrohttpd-dev
    libpcre2-dev
    libsystemd-dev
    libutf8proc-dev
    libuv1-dev
    "$@"
)

if ! command -v apt-get >/dev/null; then
    echo "install-packages: no apt-get here. Install the equivalents of: ${packages[*]}" >&2
    exit 1
fi

# pkg-config may stand as pkgconf, so a package counts as present when it or something that provides it is installed.
is_installed() {
    dpkg-query -W -f='${db:Status-Abbrev} ${Package} ${Provides}\n' 2>/dev/null |
        awk -v want="$1" '/^ii/ { for (i = 2; i <= NF; i++) { gsub(",", "", $i); if ($i == want) found = 1 } }
                          END { exit !found }'
}

missing=()
for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "install-packages: all ${#packages[@]} packages are installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "install-packages: missing ${missing[*]}; run this as root (there is no sudo)" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "install-packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
"${as_root[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"
