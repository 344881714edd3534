#!/bin/sh
# Three router replicas, a Redis and a simulated engine on one machine, until Ctrl-C.
#
#     sh up.sh
#
# The replicas listen on 127.0.0.2 to 127.0.0.4, like three pods behind one DNS name. Linux has these addresses;
# elsewhere, create them first (macOS: `sudo ifconfig lo0 alias 127.0.0.2`). PORT, ADMIN_PORT, PEERS_PORT,
# ENGINE_PORT and REDIS_PORT change the default ports 8080, 9090, 9701, 8001 and 6379.

set -eu

here=$(dirname "$0")
: "${WARMROUTE_STATE_KEY:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export WARMROUTE_STATE_KEY

running=
begin() {
    "$@" &
    running="$running $!"
}
# shellcheck disable=SC2086 # Several numbers.
trap 'kill $running 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

begin redis-server --port "${REDIS_PORT:-6379}" --bind 127.0.0.1 --save '' --loglevel warning
begin warmroute sim --listen "127.0.0.1:${ENGINE_PORT:-8001}"
for address in 127.0.0.2 127.0.0.3 127.0.0.4; do
    begin env ADDRESS=$address warmroute serve --config "$here/router.yaml"
    echo "router: http://$address:${PORT:-8080}/v1, admin API: http://$address:${ADMIN_PORT:-9090}, process $!"
done
wait
