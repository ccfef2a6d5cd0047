#!/bin/sh
# Redis 8 and Valkey 8 beside the system's own Redis: Debian trixie's packages, unpacked with their libraries into a
# cache folder outside the tree; nothing is installed. Prints the paths of the two servers.
set -eu

ROOT="${XDG_CACHE_HOME:-$HOME/.cache}/eventbus-brokers/redis8"
PACKAGES="redis-server redis-tools valkey-server valkey-tools libc6 libgcc-s1 libstdc++6 libatomic1 libjemalloc2 \
    liblzf1 libssl3t64 libsystemd0 libcap2 libzstd1 zlib1g"

if [ ! -e "$ROOT/ready" ]; then
    command -v apt-get >/dev/null || { echo "Redis 8 is taken from Debian's packages: this needs apt-get" >&2; exit 1; }
    mkdir -p "$ROOT/apt/lists/partial" "$ROOT/apt/cache/archives/partial" "$ROOT/debs" "$ROOT/bin"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" \
        >"$ROOT/apt/sources.list"
    # Its own lists and cache: the system's apt does not hear of another release.
    apt() {
        apt-get -qq -o "Dir::Etc::sourcelist=$ROOT/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
            -o "Dir::State::lists=$ROOT/apt/lists" -o "Dir::Cache=$ROOT/apt/cache" -o Dir::State::status=/dev/null \
            -o APT::Sandbox::User= "$@" >&2
    }
    apt update
    # shellcheck disable=SC2086 # a list
    (cd "$ROOT/debs" && apt download $PACKAGES)
    for deb in "$ROOT"/debs/*.deb; do dpkg-deb --extract "$deb" "$ROOT/root"; done
    loader="$(find "$ROOT/root/" -name 'ld-linux*' | head -1)"
    libraries="$(find "$ROOT/root/" -name '*.so*' -type f -exec dirname {} + | sort -u | paste -sd: -)"
    for name in redis-server valkey-server; do
        # By their own loader: this system's C library may be older than theirs.
        printf '#!/bin/sh\nexec "%s" --library-path "%s" --argv0 "$0" "%s" "$@"\n' \
            "$loader" "$libraries" "$ROOT/root/usr/bin/$name" >"$ROOT/bin/$name"
        chmod +x "$ROOT/bin/$name"
        "$ROOT/bin/$name" --version >&2
    done
    rm -rf "$ROOT/apt" "$ROOT/debs"
    touch "$ROOT/ready"
fi
echo "$ROOT/bin/redis-server $ROOT/bin/valkey-server"
