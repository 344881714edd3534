#!/usr/bin/env bash
# Plays a trace at N routers behind nginx, over 8 engines with prefix caches (cachefleet); prints one line of JSON.
#   replicas.sh TRACE N [warmroute|vllm-router]
# Environment: WARMROUTE (the binary), SPEEDUP (20: a run takes 25 s; delays inside the routers count 20-fold, so use
# 2 to judge what replicas share), RATE (2: times the recorded rate), EXTRA (YAML lines added to each replica's configuration; {self} becomes the
# replica's own address for its peers, {peers} the list of all).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rig=${RIG:-$here/target/release}
trace=$1 count=$2 what=${3:-warmroute} speedup=${SPEEDUP:-20}
state=$(mktemp -d)
pids=()
stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$state"
}
trap stop EXIT

"$rig/cachefleet" --workers 8 --speedup "$speedup" --block-bytes "${BLOCK_BYTES:-128}" >/dev/null &
pids+=($!)
sleep 0.5

peers=$(for i in $(seq "$count"); do printf '"127.0.0.1:%d", ' $((9700 + i)); done)
for i in $(seq "$count"); do
    port=$((9500 + i))
    if [ "$what" = warmroute ]; then
        extra=${EXTRA:-}
        extra=${extra//\{self\}/127.0.0.1:$((9700 + i))}
        {
            echo "api: {listen: '127.0.0.1:$port'}"
            echo "admin: {listen: '127.0.0.1:$((port + 1000))'}"
            echo "responses: {mode: pass_through}"
            echo "workers: [$(printf '"http://127.0.0.1:%d", ' $(seq 9100 9107))]"
            echo "${extra//\{peers\}/${peers%, }}"
        } >"$state/$i.yaml"
        "${WARMROUTE:?names the binary}" serve --config "$state/$i.yaml" 2>"$state/$i.log" &
        pids+=($!)
    else
        pids+=("$(WORKERS=8 STATE=$state "$here/others.sh" "$what" "$port" cache_aware)")
    fi
done

{
    echo "worker_processes 1; pid $state/pid; error_log $state/error.log; daemon off; events { worker_connections 8192; }"
    echo "http { access_log off; client_body_temp_path $state; proxy_temp_path $state;"
    echo "  client_max_body_size 64m; client_body_buffer_size 1m;"
    echo "  upstream routers { keepalive 256; $(printf 'server 127.0.0.1:%d; ' $(seq 9501 $((9500 + count)))) }"
    echo "  server { listen 127.0.0.1:9590; location / { proxy_pass http://routers; proxy_http_version 1.1;"
    echo "    proxy_set_header Connection ''; proxy_buffering off; proxy_read_timeout 600s; } } }"
} >"$state/nginx.conf"
nginx -c "$state/nginx.conf" -p "$state" 2>"$state/nginx.log" &
pids+=($!)

for _ in $(seq 60); do
    curl -sf -m 2 -o /dev/null http://127.0.0.1:9590/v1/models && break
    sleep 0.5
done
sleep 4
result=$("$rig/player" --trace "$trace" --addr 127.0.0.1:9590 --rate "${RATE:-2}" --requests 3000 --speedup "$speedup" --block-bytes "${BLOCK_BYTES:-128}")
echo "$what replicas=$count speedup=$speedup $result"
