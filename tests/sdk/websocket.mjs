// OpenAI's Node SDK over a WebSocket against a router that test_examples.py has started. Exits with an error if
// something is not as expected.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const client = new OpenAI({ baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", maxRetries: 0, timeout: Number(process.env.LIMIT_MS) });
const socket = new ResponsesWS(client);
const events = socket.stream();
const last = ["response.completed", "response.incomplete", "response.failed", "error"];

// The types of a turn's events, and the last of them.
const turn = async (options) => {
  socket.send({ type: "response.create", model: "sim", input: "Tell me of the sea.", max_output_tokens: 8, ...options });
  const types = [];
  for (;;) {
    const { value, done } = await events.next();
    assert.ok(!done, "the connection ended");
    // An error frame is an error of the SDK.
    const event = value.type === "error" ? { type: "error", error: value.error } : value.message;
    if (!event) continue;
    types.push(event.type);
    if (last.includes(event.type)) return { types, event };
  }
};

const first = await turn({ store: false });
assert.deepEqual(first.types.slice(0, 2), ["response.created", "response.in_progress"]);
assert.ok(first.types.includes("response.output_text.delta"));
const second = await turn({ store: false, previous_response_id: first.event.response.id });
assert.equal(second.event.response.previous_response_id, first.event.response.id);
const lane = await turn({ store: false, previous_response_id: second.event.response.id, stream_id: "fork" });
assert.equal(lane.event.stream_id, "fork");
const lost = await turn({ previous_response_id: first.event.response.id });
assert.match(String(lost.event.error?.message), /not found/);
socket.close();
