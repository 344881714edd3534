#!/usr/bin/env bash
# The same load over each router in turn; prints the router's CPU time a request.
#   compare.sh NAME=PORT:PID ...
# Environment: PATHS (request paths), MODES ("plain stream"), ROUNDS, SECS, CONNS, PROMPT (characters), DISTINCT (prompts).
# Rounds are interleaved, so that a slow phase of the machine meets all routers; the table has medians and spreads.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
blast=${RIG:-$here/target/release}/blast

for path in ${PATHS:-/v1/chat/completions}; do
    for mode in ${MODES:-plain stream}; do
        for _ in $(seq "${ROUNDS:-5}"); do
            for router in "$@"; do
                name=${router%%=*} address=${router#*=}
                flags=(--addr "127.0.0.1:${address%%:*}" --pid "${address##*:}" --path "$path"
                    --secs "${SECS:-4}" --conns "${CONNS:-16}" --prompt "${PROMPT:-2000}" --distinct "${DISTINCT:-64}")
                [ "$mode" = stream ] && flags+=(--stream)
                echo "$path $mode $name $("$blast" "${flags[@]}")"
            done
        done
    done
done | python3 "$here/table.py"
