#!/bin/sh
# The Redis of `make brokers`: install, start, stop, url. On loopback, on its own port and data folder; the system's own
# server, if there is one, is neither started nor touched. Taken in this order: a URL from the environment, a
# redis-server on the path, Debian's package.
set -eu

PORT="${EVENTBUS_REDIS_PORT:-6390}"
HOME_DIR="${XDG_CACHE_HOME:-$HOME/.cache}/eventbus-brokers/redis"
CONFIG="$(cd "$(dirname "$0")/.." && pwd)/docs/redis.conf"
PID_FILE="$HOME_DIR/pid"

install() {
    command -v redis-server >/dev/null && return
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "redis-server is missing: apt-get install redis-server, or set EVENTBUS_TEST_REDIS_URL" >&2
        exit 1
    fi
    # Debian starts a server of its own when the package is installed; policy-rc.d is how one says no.
    policy=/usr/sbin/policy-rc.d
    made=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made=1
    fi
    trap '[ -z "$made" ] || rm -f "$policy"' EXIT
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server redis-sentinel >&2
    [ -z "$made" ] || rm -f "$policy"
    trap - EXIT
}

running() {
    # Ours only: a number in a file may have become somebody else's process.
    [ -f "$PID_FILE" ] && pid="$(cat "$PID_FILE")" && [ -r "/proc/$pid/cmdline" ] &&
        tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q "redis-server.*:$PORT"
}

case "${1:-start}" in
install)
    [ -n "${EVENTBUS_TEST_REDIS_URL:-}" ] || install
    ;;
start)
    if [ -n "${EVENTBUS_TEST_REDIS_URL:-}" ]; then
        echo "$EVENTBUS_TEST_REDIS_URL"
        exit 0
    fi
    install
    if ! running; then
        mkdir -p "$HOME_DIR"
        cp "$CONFIG" "$HOME_DIR/redis.conf" # a server may write into the file it was given
        redis-server "$HOME_DIR/redis.conf" --port "$PORT" --bind 127.0.0.1 --dir "$HOME_DIR" --daemonize yes \
            --pidfile "$PID_FILE" --logfile "$HOME_DIR/log" >/dev/null
        tries=0
        until redis-cli -p "$PORT" ping 2>/dev/null | grep -q PONG; do
            tries=$((tries + 1))
            [ "$tries" -lt 150 ] || { tail -20 "$HOME_DIR/log" >&2; exit 1; }
            sleep 0.1
        done
    fi
    echo "redis://127.0.0.1:$PORT/0"
    ;;
stop)
    if running; then
        kill "$(cat "$PID_FILE")"
    fi
    rm -f "$PID_FILE"
    ;;
url)
    echo "${EVENTBUS_TEST_REDIS_URL:-redis://127.0.0.1:$PORT/0}"
    ;;
*)
    echo "usage: $0 start|stop|url" >&2
    exit 2
    ;;
esac
