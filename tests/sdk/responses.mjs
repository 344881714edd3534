// OpenAI's Node SDK against two replicas over one Redis that test_examples.py has started: each call
// goes to the other one. Exits with an error if something is not as expected.

import assert from "node:assert/strict";

import OpenAI from "openai";

const model = "sim";
const HELLO = "Tell me of the sea, at some length, if you would.";
const weather = {
  type: "function",
  name: "weather",
  description: "What the weather is like.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  strict: false,
};
const include = ["reasoning.encrypted_content"];

const clients = process.env.OPENAI_BASE_URLS.split(",").map(
  (baseURL) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: Number(process.env.LIMIT_MS) }),
);
let turn = 0;
const sdk = () => clients[turn++ % clients.length];
const create = (input, options = {}) => sdk().responses.create({ model, input, ...options });
const user = (content) => ({ role: "user", content });
const all = async (list) => {
  const found = [];
  for await (const item of list) found.push(item);
  return found;
};
const refused = (call, kind, expected) =>
  assert.rejects(call, (error) => {
    assert.ok(error instanceof kind, String(error));
    for (const [name, value] of Object.entries(expected)) assert.equal(error[name], value, String(error));
    return true;
  });
const forgotten = async (id) => {
  for (const _ of clients) {
    const call = () => sdk().responses.retrieve(id);
    await refused(call, OpenAI.NotFoundError, { code: null, type: "invalid_request_error" });
    const expected = { code: "previous_response_not_found", param: "previous_response_id" };
    await refused(() => create(HELLO, { previous_response_id: id }), OpenAI.BadRequestError, expected);
  }
};

const checks = {
  async "what is created is there on the other replica"() {
    const created = await create(HELLO, { metadata: { ticket: "7" }, instructions: "Be brief." });
    assert.equal(created.status, "completed");
    assert.deepEqual(created.metadata, { ticket: "7" });
    assert.ok(created.output_text);
    const again = await sdk().responses.retrieve(created.id, { include: ["message.output_text.logprobs"] });
    assert.equal(again.output_text, created.output_text);
    assert.deepEqual(again.output, created.output);
    await forgotten((await create(HELLO, { store: false })).id);
  },

  async "a stream is numbered, ends once, and is stored when it ends"() {
    const events = await all(await create(HELLO, { stream: true }));
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
    assert.deepEqual(events.slice(0, 2).map((event) => event.type), ["response.created", "response.in_progress"]);
    const last = events.at(-1);
    assert.equal(last.type, "response.completed");
    const text = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    const stored = await sdk().responses.retrieve(last.response.id);
    assert.equal(stored.output_text, text.join(""));
  },

  async "the stream helper gives the final response"() {
    const stream = sdk().responses.stream({ model, input: HELLO, tools: [weather] });
    const events = await all(stream);
    const final = await stream.finalResponse();
    assert.equal(events.at(-1).type, "response.completed");
    assert.equal(final.output[0].type, "function_call");
    assert.ok(JSON.parse(final.output[0].arguments).city);
  },

  async "a schema is parsed"() {
    const schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
    const format = { type: "json_schema", name: "town", schema };
    const parsed = await sdk().responses.parse({ model, input: "Name a town.", text: { format } });
    assert.ok(JSON.parse(parsed.output_text).name);
  },

  async "what is deleted is gone from every replica"() {
    const created = await create(HELLO);
    await sdk().responses.delete(created.id);
    for (const _ of clients) await refused(() => sdk().responses.delete(created.id), OpenAI.NotFoundError, {});
    await forgotten(created.id);
  },

  async "input items come in pages either way"() {
    const given = [0, 1, 2, 3, 4].map((number) => user(`Number ${number}`));
    const created = await create(given);
    for (const order of ["asc", "desc"]) {
      const items = await all(sdk().responses.inputItems.list(created.id, { limit: 1, order }));
      const texts = items.map((item) => item.content[0].text);
      const expected = given.map((item) => item.content);
      assert.deepEqual(texts, order === "asc" ? expected : expected.reverse());
    }
    const after = (await sdk().responses.inputItems.list(created.id, { order: "asc", limit: 2 })).data[1].id;
    const rest = await sdk().responses.inputItems.list(created.id, { order: "asc", after });
    assert.equal(rest.data.length, 3);
    const wrong = () => sdk().responses.inputItems.list(created.id, { limit: 101 });
    await refused(wrong, OpenAI.BadRequestError, { param: "limit" });
  },

  async "a loop of tools goes on from the last response, and branches"() {
    const asked = await create("What is the weather like?", { tools: [weather] });
    const call = asked.output.at(-1);
    const output = { type: "function_call_output", call_id: call.call_id, output: "Rain." };
    const answer = await create([output], { tools: [weather], previous_response_id: asked.id });
    assert.ok(answer.output_text);
    const branches = await Promise.all(
      [0, 1, 2, 3].map((number) => create(`Branch ${number}`, { previous_response_id: answer.id })),
    );
    assert.equal(new Set(branches.map((branch) => branch.id)).size, 4);
    for (const branch of branches) assert.equal(branch.previous_response_id, answer.id);
    const expected = { param: "input" };
    await refused(() => create("Never mind.", { previous_response_id: asked.id }), OpenAI.BadRequestError, expected);
  },

  async "input tokens are counted as they will be"() {
    const first = await create("One");
    const given = { model, input: "Two", previous_response_id: first.id };
    const counted = await sdk().responses.inputTokens.count(given);
    assert.equal(counted.input_tokens, (await sdk().responses.create(given)).usage.input_tokens);
  },

  async "a conversation and its items"() {
    const made = await sdk().conversations.create({ metadata: { topic: "sea" }, items: [user("One")] });
    assert.deepEqual((await sdk().conversations.retrieve(made.id)).metadata, { topic: "sea" });
    await sdk().conversations.update(made.id, { metadata: { topic: "wind" } });
    assert.deepEqual((await sdk().conversations.retrieve(made.id)).metadata, { topic: "wind" });
    const answer = await create("Two", { conversation: made.id });
    const listed = await all(sdk().conversations.items.list(made.id, { order: "asc", limit: 1 }));
    assert.deepEqual(listed.map((item) => item.content[0].text), ["One", "Two", answer.output_text]);
    const added = await sdk().conversations.items.create(made.id, { items: [user("Three")] });
    const { id } = added.data[0];
    assert.equal((await sdk().conversations.items.retrieve(id, { conversation_id: made.id })).id, id);
    await sdk().conversations.items.delete(id, { conversation_id: made.id });
    assert.equal((await all(sdk().conversations.items.list(made.id))).length, 3);
    assert.equal((await sdk().conversations.delete(made.id)).deleted, true);
    await refused(() => sdk().conversations.retrieve(made.id), OpenAI.NotFoundError, {});
  },

  async "a conversation that the client keeps goes on anywhere"() {
    const history = [];
    let previous;
    for (const text of ["Tell me of the sea.", "And of the wind?", "And of the sand?"]) {
      history.push(user(text));
      const past = previous ? { previous_response: previous } : {};
      const answer = await create(text, { store: false, include, ...past });
      assert.ok(answer.output.at(-1).encrypted_content.startsWith("wrc1."));
      assert.equal(answer.output_text, (await create(history, { store: false })).output_text);
      history.push({ role: "assistant", content: answer.output_text });
      previous = JSON.parse(JSON.stringify(answer));
    }
    const stateItem = previous.output.at(-1);
    stateItem.encrypted_content = stateItem.encrypted_content.replace(/.$/, (last) => (last === "A" ? "Q" : "A"));
    const call = () => create("Four", { store: false, previous_response: previous });
    await refused(call, OpenAI.BadRequestError, { code: "invalid_encrypted_content" });
  },

  async "raw answers have a request id"() {
    const { data, response, request_id } = await create(HELLO, {}).withResponse();
    assert.ok(data.id && request_id);
    assert.equal(response.headers.get("x-request-id"), request_id);
    const unknown = () => sdk().responses.create({ model: "none", input: HELLO });
    await refused(unknown, OpenAI.NotFoundError, { code: "model_not_found", param: "model" });
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok: ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED: ${name}\n${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
