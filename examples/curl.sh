#!/bin/sh
# The API with curl, and why the router chose a worker.
#
#     OPENAI_BASE_URL=http://localhost:8080/v1 sh curl.sh
#
# MODEL is the model to use. With ADMIN_URL, the address of the admin listener, it also calls /explain; ADMIN_TOKEN is
# its token, if it has one.

set -eu

base=${OPENAI_BASE_URL:-http://localhost:8080/v1}

# -f: exit with an error when the answer is one. -S: and say which.
ask() {
    curl -fsS -H 'content-type: application/json' "$@"
    echo
}

echo '# models'
ask "$base/models"
model=${MODEL:-$(curl -fsS "$base/models" | sed -n 's/^[^[]*\[{"id":"\([^"]*\)".*/\1/p')}

echo "# an answer from $model, with the router's decision among its headers"
ask -i -H 'x-warmroute-decision: 1' "$base/chat/completions" -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "What is a radix tree, in a sentence?"}],
  "max_tokens": 16
}'

echo '# the same, streamed'
ask -N "$base/chat/completions" -d '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "What is a radix tree, in a sentence?"}],
  "max_tokens": 8, "stream": true, "stream_options": {"include_usage": true}
}'

echo '# the Responses API'
ask "$base/responses" -d '{
  "model": "'"$model"'", "input": "What is a radix tree, in a sentence?", "max_output_tokens": 16
}'

if [ -n "${ADMIN_URL:-}" ]; then
    echo '# what each worker would cost for a request like the first'
    ask -H "authorization: Bearer ${ADMIN_TOKEN:-}" "$ADMIN_URL/explain" -d '{
      "model": "'"$model"'",
      "messages": [{"role": "user", "content": "What is a radix tree, in a sentence?"}]
    }'
    echo '# the fleet'
    ask -H "authorization: Bearer ${ADMIN_TOKEN:-}" "$ADMIN_URL/fleet"
fi
