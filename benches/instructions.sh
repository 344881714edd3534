#!/usr/bin/env bash
# Instructions that warmroute takes for a request, counted by valgrind: the same on a noisy machine and on a quiet one.
#
#   benches/instructions.sh NAME=BINARY [NAME=BINARY ...]
#
# A name's arguments and environment come from files beside this call, if there are any: NAME.yaml is added to the
# configuration, NAME.env has lines VARIABLE=VALUE. Each binary is started under callgrind in front of a simulated engine
# (of the first binary, not counted). After 20 requests that warm it up the counter is set to 0, and read after N and
# after 3 N more requests: the difference, without what does not grow with requests, is that of 2 N. Prints each binary's
# instructions for a request, as the median of RUNS, and the difference from the first.
#
#   REQUESTS=200 RUNS=3 STREAM=1 PROMPT=2000 TOKENS=16     how many, how often, streamed or not, bytes, tokens of an answer
#   BODY='"temperature":0'                                 more members of the body
#   HEADER='traceparent: 00-...'                           a header of each request
#   API=/v1/messages                                       another API than chat completions that takes the same body
#
# Needs: valgrind (with callgrind_control), curl, awk.
set -euo pipefail
REQUESTS=${REQUESTS:-200} RUNS=${RUNS:-3} STREAM=${STREAM:-1} PROMPT=${PROMPT:-2000} TOKENS=${TOKENS:-16}
API=${API:-/v1/chat/completions} BODY=${BODY:-} HEADER=${HEADER:-x-none: none}
[ $# -gt 0 ] || { sed -n '2,20p' "$0"; exit 2; }
work=$(mktemp -d)
pids=()
finish() { for pid in "${pids[@]:-}"; do [ -z "$pid" ] || kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true; rm -rf "$work"; }
trap finish EXIT

free_port() { python3 -c 'import socket; s=socket.socket(); s.bind(("127.0.0.1",0)); print(s.getsockname()[1])'; }
until_up() { for _ in $(seq 600); do curl -sf -o /dev/null "$1" && return; sleep 0.2; done; echo "$1 does not answer" >&2; exit 1; }

first=${1#*=}
engine=$(free_port)
"$first" sim --listen "127.0.0.1:$engine" --decode-time 1ms >/dev/null 2>&1 & pids+=($!)
until_up "http://127.0.0.1:$engine/health"

text=$(head -c "$PROMPT" /dev/zero | tr '\0' 'a' | sed 's/aaaaaaaa/a word. /g')
stream=$([ "$STREAM" = 1 ] && echo true || echo false)
printf '{"model":"sim","messages":[{"role":"user","content":"%s"}],"max_tokens":%s,"stream":%s%s}' \
    "$text" "$TOKENS" "$stream" "${BODY:+,$BODY}" > "$work/body"

# One connection, so that a count has nothing of the client's.
send() {
    local url="http://127.0.0.1:$1$API" config="$work/curl"
    : > "$config"
    for _ in $(seq "$2"); do printf 'url = "%s"\noutput = "/dev/null"\n' "$url" >> "$config"; done
    curl -sf --data-binary "@$work/body" -H 'content-type: application/json' -H "$HEADER" -K "$config"
}

# Instructions of all threads since the last count.
count() {
    rm -f "$work"/out.*
    callgrind_control --dump "$1" >/dev/null 2>&1
    sleep 1
    cat "$work"/out.* | awk '/^(summary|totals):/ {if ($2 > most) most = $2} END {printf "%.0f\n", most}'
}

measure() { # NAME BINARY
    local api admin pid before after
    api=$(free_port) admin=$(free_port)
    {
        printf 'api: {listen: "127.0.0.1:%s", drain_delay: 0s}\nadmin: {listen: "127.0.0.1:%s"}\n' "$api" "$admin"
        # Health checks would count, too.
        printf 'workers: ["http://127.0.0.1:%s"]\nfleet: {health: {interval: 1h}}\nruntime: {threads: 1}\n' "$engine"
        [ ! -f "$1.yaml" ] || cat "$1.yaml"
    } > "$work/config.yaml"
    local environment=()
    [ ! -f "$1.env" ] || mapfile -t environment < "$1.env"
    rm -f "$work"/out.*
    env "${environment[@]}" valgrind --tool=callgrind --callgrind-out-file="$work/out" --dump-instr=no --separate-threads=no \
        "$2" serve --config "$work/config.yaml" >"$work/log" 2>&1 & pid=$!
    pids+=("$pid")
    until_up "http://127.0.0.1:$admin/readyz"
    send "$api" 20
    callgrind_control --zero "$pid" >/dev/null 2>&1; sleep 0.5
    send "$api" "$REQUESTS"
    before=$(count "$pid")
    send "$api" $((3 * REQUESTS))
    after=$(count "$pid")
    kill "$pid"; wait "$pid" 2>/dev/null || true
    echo $(((after - before) / (2 * REQUESTS)))
}

printf '%-20s %16s %10s   %s\n' binary 'instructions' 'to first' 'runs'
base=
for pair in "$@"; do
    name=${pair%%=*} binary=${pair#*=} runs=()
    for _ in $(seq "$RUNS"); do runs+=("$(measure "$name" "$binary")"); done
    median=$(printf '%s\n' "${runs[@]}" | sort -n | awk '{line[NR]=$1} END {print line[int((NR+1)/2)]}')
    base=${base:-$median}
    printf '%-20s %16s %9s%%   %s\n' "$name" "$median" "$(awk -v a="$median" -v b="$base" 'BEGIN {printf "%+.2f", (a/b-1)*100}')" "${runs[*]}"
done
