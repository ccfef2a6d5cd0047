#!/bin/sh
# RabbitMQ 4 from Debian trixie in a folder of its own, for `make test-rabbit4`: installs it once and prints its home,
# which is what EVENTBUS_RABBIT_HOME takes. Needs root: its programs run in that folder as their root directory.
set -eu

BASE="${XDG_CACHE_HOME:-$HOME/.cache}/eventbus-brokers"
ROOT="$BASE/trixie"
HOME_DIR="$BASE/rabbitmq-4"

if [ ! -x "$HOME_DIR/bin/rabbitmq-server" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "RabbitMQ 4 is installed by debootstrap, as root on Debian; or set EVENTBUS_RABBIT_HOME yourself" >&2
        exit 1
    fi
    command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq debootstrap; } >&2
    if [ ! -x "$ROOT/usr/lib/rabbitmq/bin/rabbitmq-server" ]; then
        rm -rf "$ROOT"
        debootstrap --variant=minbase trixie "$ROOT" >&2
        cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
        printf '#!/bin/sh\nexit 101\n' >"$ROOT/usr/sbin/policy-rc.d" # nothing is started in there by being installed
        chmod +x "$ROOT/usr/sbin/policy-rc.d"
        DEBIAN_FRONTEND=noninteractive chroot "$ROOT" \
            apt-get -q -y install --no-install-recommends rabbitmq-server >&2
    fi
    mkdir -p "$HOME_DIR/bin"
    for name in rabbitmq-server rabbitmqctl; do
        # The mounts are seen by this one process and its children only, and are gone with them.
        cat >"$HOME_DIR/bin/$name.new" <<SCRIPT
#!/bin/sh
export EVENTBUS_ROOT="$ROOT" EVENTBUS_DATA="\${RABBITMQ_MNESIA_BASE%/mnesia}"
exec unshare -m sh -ec '
    for folder in /proc /dev "\${TMPDIR:-/tmp}" "\$EVENTBUS_DATA"; do
        mkdir -p "\$EVENTBUS_ROOT\$folder"
        mount --rbind "\$folder" "\$EVENTBUS_ROOT\$folder"
    done
    exec chroot "\$EVENTBUS_ROOT" "\$@"' sh /usr/lib/rabbitmq/bin/$name "\$@"
SCRIPT
        chmod +x "$HOME_DIR/bin/$name.new"
        mv "$HOME_DIR/bin/$name.new" "$HOME_DIR/bin/$name"
    done
fi
echo "$HOME_DIR"
