#!/usr/bin/env bash
# Goodput at twice the load that the engines can bear: requests a second with a first token within TARGET seconds.
#   overload.sh
# First the capacity: the highest rate at which 99 % of the requests are in time, through the router without a queue.
# Then FACTOR (2) times that rate, at the router without a queue, with one, and at the OTHERS ("vllm-router smg"; see
# others.sh). Prints one line for each run.
# Environment: WARMROUTE (the binary), RIG, TARGET (2), SECS (30), PROMPT (1000 tokens), PREFIXES (0), RATE (12000 tokens a
# second and engine), QUEUE (YAML of `queue`), CAPACITY (measured before), RUNS (3), ARGS (more flags of `overload`).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
rig=${RIG:-$here/target/release}
target=${TARGET:-2} secs=${SECS:-30} prompt=${PROMPT:-1000} prefixes=${PREFIXES:-0} engine_rate=${RATE:-12000}
workers=4 factor=${FACTOR:-2}
queue=${QUEUE:-"{ttft_target: ${target}s}"}
state=$(mktemp -d)
pids=()
stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    pids=()
}
trap 'stop; rm -rf "$state"' EXIT

# One run against fresh engines and a fresh router: run KIND RATE SEED
run() {
    "$rig/cachefleet" --workers "$workers" --speedup 1 --prefill-rate "$engine_rate" \
        --block-bytes 128 --block-tokens 32 --itl 0.01 >/dev/null &
    pids+=($!)
    sleep 0.5
    local port=9500
    case $1 in
    off | on)
        {
            echo "api: {listen: '127.0.0.1:$port'}"
            echo "admin: {listen: '127.0.0.1:$((port + 1000))'}"
            echo "responses: {mode: pass_through}"
            echo "log: {access: false}"
            echo "workers: [$(printf '"http://127.0.0.1:%d", ' $(seq 9100 $((9099 + workers))))]"
            [ "$1" = off ] || echo "queue: $queue"
        } >"$state/config.yaml"
        "${WARMROUTE:?names the binary}" serve --config "$state/config.yaml" 2>"$state/log" &
        pids+=($!)
        ;;
    smg-priority)
        pids+=("$(WORKERS=$workers STATE=$state EXTRA="${SMG_PRIORITY:-}" "$here/others.sh" smg "$port" cache_aware)")
        ;;
    *)
        pids+=("$(WORKERS=$workers STATE=$state "$here/others.sh" "$1" "$port" cache_aware)")
        ;;
    esac
    for _ in $(seq 60); do
        curl -sf -m 2 -o /dev/null "http://127.0.0.1:$port/v1/models" && break
        sleep 0.5
    done
    sleep 2
    # shellcheck disable=SC2086
    "$rig/overload" --addr "127.0.0.1:$port" --rate "$2" --secs "$secs" --target "$target" --prompt "$prompt" \
        --prefixes "$prefixes" --seed "$3" ${ARGS:-}
    stop
}

field() { python3 -c "import json,sys; print(json.loads(sys.stdin.read())['$1'])"; }

capacity=${CAPACITY:-}
if [ -z "$capacity" ]; then
    # Halve the interval between nothing and all that the engines could compute.
    low=0 high=$(python3 -c "print($workers * $engine_rate / $prompt * ${REUSE:-1})")
    for step in 1 2 3 4 5; do
        rate=$(python3 -c "print(round(($low + $high) / 2, 2))")
        line=$(run off "$rate" "$step")
        echo "capacity? $line" >&2
        if [ "$(echo "$line" | python3 -c "import json,sys; print(json.loads(sys.stdin.read())['share_within'] >= 0.99)")" = True ]; then
            low=$rate
        else
            high=$rate
        fi
    done
    capacity=$low
fi
echo "capacity: $capacity requests/s with 99 % within $target s"
rate=$(python3 -c "print($capacity * $factor)")
for seed in $(seq "${RUNS:-3}"); do
    for kind in ${KINDS:-on off} ${OTHERS:-}; do
        line=$(run "$kind" "$rate" "$seed")
        share=$(python3 -c "print(round($(echo "$line" | field goodput) / $capacity, 3))")
        echo "$kind goodput/capacity=$share $line"
    done
done
