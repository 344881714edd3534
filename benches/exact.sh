#!/usr/bin/env bash
# CPU of warmroute with exact KV events and a tokenizer, beside other proxies in front of the same engines and warmroute
# without either: four simulated engines that publish every block they store and evict, 16 connections, prompts of 2 KB that are
# new to the fleet, answers of two tokens, plain and streamed.
#
#   MODEL=FOLDER benches/exact.sh
#
# MODEL is a folder with a tokenizer.json and a chat template, such as the one that
# `hf download Qwen/Qwen3-0.6B --include "*.json" "*.jinja"` prints. Environment: WARMROUTE (target/dist/warmroute), RIG
# (the programs of benches/rig), MODES ("plain stream"), ROUNDS (5), SECS (4), OTHERS ("nginx"; also "haproxy" and "envoy", as
# benches/rig/others.sh starts them), ALSO ("NAME=BINARY ...": other builds, with tokenizer and events) and what else
# benches/rig/compare.sh takes.
#
# Needs: OTHERS, the programs of benches/rig, free ports 9100 to 9103, 9200 to 9207 and 8081 to 8098.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
warmroute=${WARMROUTE:-$here/../target/dist/warmroute}
model=${MODEL:?a folder with a tokenizer.json}
work=$(mktemp -d)
pids=()
finish() { kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"; }
trap finish EXIT
until_up() { for _ in $(seq 100); do curl -sf -o /dev/null "$1" && return; sleep 0.1; done; echo "$1 does not answer" >&2; exit 1; }

workers='' workers_with_events=''
for k in 0 1 2 3; do
    address=127.0.0.1:$((9100 + k)) events=tcp://127.0.0.1:$((9200 + 2 * k)) replay=tcp://127.0.0.1:$((9201 + 2 * k))
    "$warmroute" sim --listen "$address" --model mock --tokenizer "$model" --decode-time 0ms --stop-after 2 \
        --prefill-tokens-per-second 2000000 --kv-events "$events" --kv-replay "$replay" >/dev/null 2>&1 &
    pids+=($!)
    until_up "http://$address/health"
    workers+="  - url: http://$address"$'\n'
    workers_with_events+="  - {url: http://$address, events: {from: zmq, endpoint: $events, replay: $replay}}"$'\n'
done

start() { # NAME PORT WORKERS MODELS [BINARY]
    {
        printf 'api: {listen: "127.0.0.1:%s"}\nadmin: {listen: "127.0.0.1:%s"}\n' "$2" $(($2 + 1))
        printf 'log: {level: warn, access: false}\nmodels: [%s]\nworkers:\n%s' "$4" "$3"
    } >"$work/$1.yaml"
    "${5:-$warmroute}" serve --config "$work/$1.yaml" >"$work/$1.log" 2>&1 &
    pids+=($!)
    until_up "http://127.0.0.1:$(($2 + 1))/readyz"
}

others=() port=8095
for other in ${OTHERS:-nginx}; do
    pid=$(STATE="$work" "$here/rig/others.sh" "$other" "$port")
    pids+=("$pid")
    others+=("$other=$port:$pid")
    port=$((port + 1))
done
with_tokenizer="{name: mock, tokenizer: {from: folder, path: $model}}"
start predicted 8091 "$workers" ''
predicted=${pids[-1]}
start exact 8093 "$workers_with_events" "$with_tokenizer"
exact=${pids[-1]}
builds=() port=8081
for build in ${ALSO:-}; do
    start "${build%%=*}" "$port" "$workers_with_events" "$with_tokenizer" "${build#*=}"
    builds+=("${build%%=*}=$port:${pids[-1]}")
    port=$((port + 2))
done
sleep 2

DISTINCT=${DISTINCT:-100000} "$here/rig/compare.sh" "${others[@]}" predicted=8091:"$predicted" exact=8093:"$exact" "${builds[@]}"
