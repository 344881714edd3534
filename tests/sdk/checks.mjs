// OpenAI's Node SDK against a router that test_examples.py has started. Exits with an error if
// something is not as expected.

import assert from "node:assert/strict";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: Number(process.env.LIMIT_MS) });
const model = "sim";
const messages = [{ role: "user", content: "Tell me of the sea." }];

const answer = await client.chat.completions.create({ model, messages, max_tokens: 5 });
assert.equal(answer.usage.completion_tokens, 5);
assert.ok(answer._request_id);

const chunks = [];
const stream = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 7, ...stream })) {
  chunks.push(chunk);
}
assert.equal(chunks.at(-1).usage.completion_tokens, 7);

const response = await client.responses.create({ model, input: "Hello there", max_output_tokens: 5 });
assert.ok(response.output_text);
const types = [];
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 5, stream: true })) {
  types.push(event.type);
}
assert.equal(types[0], "response.created");
assert.match(types.at(-1), /^response\.(completed|incomplete)$/);

const embeddings = await client.embeddings.create({ model, input: ["one", "two"] });
assert.equal(embeddings.data.length, 2);
assert.equal(typeof embeddings.data[0].embedding[0], "number");

await assert.rejects(client.chat.completions.create({ model: "none", messages }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});
const forbidden = { model, messages, kv_transfer_params: {} };
await assert.rejects(client.chat.completions.create(forbidden), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "kv_transfer_params");
  return true;
});

// A client that leaves in the middle of an answer leaves nothing behind that keeps it from ending.
const abandoned = await client.chat.completions.create({ model, messages, max_tokens: 1000, stream: true });
for await (const chunk of abandoned) {
  assert.ok(chunk.id);
  break;
}
