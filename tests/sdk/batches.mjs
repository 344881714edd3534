// Files and batches with OpenAI's Node SDK, against a router that test_examples.py has started. Exits with an error if
// something is not as expected.

import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";

import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: Number(process.env.LIMIT_MS) });
const url = "/v1/chat/completions";
const messages = [{ role: "user", content: "Tell me of the sea." }];
const line = (custom_id, body = {}) =>
  `${JSON.stringify({ custom_id, method: "POST", url, body: { model: "sim", messages, max_tokens: 5, ...body } })}\n`;
const all = async (list) => {
  const found = [];
  for await (const item of list) found.push(item);
  return found;
};
const content = async (id) => (await client.files.content(id)).text();
const ended = async ({ id }) => {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
};
const run = async (text) => {
  const file = await client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
  return client.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h", metadata: { job: "node" } });
};

// A file of which the length is not known before: the form comes in chunks.
const folder = fs.mkdtempSync(path.join(os.tmpdir(), "warmroute-batches-"));
try {
  const name = path.join(folder, "in.jsonl");
  fs.writeFileSync(name, line("a") + line("b"));
  const file = await client.files.create({ file: fs.createReadStream(name), purpose: "batch" });
  assert.equal(file.filename, "in.jsonl");
  assert.equal(file.bytes, fs.statSync(name).size);
  assert.equal(await content(file.id), line("a") + line("b"));
  assert.deepEqual(await client.files.retrieve(file.id), file);
  assert.ok((await all(client.files.list({ limit: 1 }))).some(({ id }) => id === file.id));
  assert.equal((await client.files.delete(file.id)).deleted, true);
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
} finally {
  fs.rmSync(folder, { recursive: true });
}

const created = await run([1, 2, 3].map((number) => line(`l${number}`)).join("") + line("bad", { max_tokens: 10_000_000 }));
assert.deepEqual(created.metadata, { job: "node" });
const batch = await ended(created);
assert.equal(batch.status, "completed");
assert.deepEqual(batch.request_counts, { total: 4, completed: 3, failed: 1 });
const results = (await content(batch.output_file_id)).trimEnd().split("\n").map((text) => JSON.parse(text));
assert.deepEqual(results.map(({ custom_id }) => custom_id).sort(), ["l1", "l2", "l3"]);
for (const { response, error } of results) {
  assert.equal(error, null);
  assert.equal(response.body.usage.completion_tokens, 5);
}
assert.equal(JSON.parse(await content(batch.error_file_id)).custom_id, "bad");
assert.equal((await all(client.batches.list({ limit: 1 })))[0].id, batch.id);

const failed = await ended(await run("nothing\n"));
assert.equal(failed.status, "failed");
assert.equal(failed.errors.data[0].line, 1);

const long = await run([1, 2, 3, 4].map((number) => line(`l${number}`, { max_tokens: 4_000 })).join(""));
assert.match((await client.batches.cancel(long.id)).status, /^cancell(ing|ed)$/);
assert.equal((await ended(long)).status, "cancelled");
await assert.rejects(client.batches.cancel("batch_none"), OpenAI.NotFoundError);
