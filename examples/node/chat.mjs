// A conversation through the router with OpenAI's own client.
//
//     npm install openai
//     OPENAI_BASE_URL=http://localhost:8080/v1 node chat.mjs

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8080/v1",
  // The client requires a key; the router has the engines' keys.
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});

async function main() {
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  if (models.length === 0) throw new Error("no worker is healthy yet, so no model is served");
  const model = process.env.MODEL ?? models[0];
  console.log("models:", models.join(", "));

  // Each turn repeats the conversation so far; the router sends it to the worker that has it cached.
  const messages = [{ role: "system", content: "You are a patient librarian. Answer in a sentence." }];
  for (const question of ["What is a trie?", "And how does a radix tree differ?"]) {
    messages.push({ role: "user", content: question });
    messages.push({ role: "assistant", content: await stream(model, messages) });
  }

  try {
    await client.chat.completions.create({ model: "no-such-model", messages });
  } catch (error) {
    if (!(error instanceof OpenAI.NotFoundError)) throw error;
    console.log("expected error:", error.code, "-", error.error.message);
  }
}

/** Prints an answer while it is streamed, and returns it. */
async function stream(model, messages) {
  console.log("\n>", messages.at(-1).content);
  const chunks = await client.chat.completions.create({
    model,
    messages,
    max_tokens: 32,
    stream: true,
    stream_options: { include_usage: true },
  });
  let answer = "";
  for await (const chunk of chunks) {
    const text = chunk.choices[0]?.delta?.content ?? "";
    answer += text;
    process.stdout.write(text);
    if (chunk.usage) {
      const cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      console.log(`\n  [${cached} of ${chunk.usage.prompt_tokens} prompt tokens were cached]`);
    }
  }
  return answer;
}

try {
  await main();
} catch (error) {
  if (error instanceof OpenAI.APIConnectionError) console.error(`no router at ${client.baseURL}: ${error.message}`);
  else if (error instanceof OpenAI.APIError) console.error(`${error.message} (request ${error.requestID})`);
  else throw error;
  process.exitCode = 1;
}
