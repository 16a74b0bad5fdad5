// The official client of OpenAI for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { MODEL, QUESTION, NEXT, TOOL, FORM, CALL_TOKENS, TOKENS, isPet } from "./questions.mjs";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const given = { model: MODEL, temperature: 0, max_tokens: TOKENS };
const call = { ...given, tools: [TOOL], tool_choice: "required", max_tokens: CALL_TOKENS };

// Two turns.
const whole = await client.chat.completions.create({ ...given, messages: [QUESTION] });
const first = whole.choices[0].message;
const second = await client.chat.completions.create({ ...given, messages: [QUESTION, first, NEXT] });
assert.ok(second.choices[0].message.content);

// Tools.
const calling = await client.chat.completions.create({ ...call, messages: [QUESTION] });
const [asked] = calling.choices[0].message.tool_calls;
assert.ok(["Paris", "Rome"].includes(JSON.parse(asked.function.arguments).city));

// Structured output.
const formed = await client.chat.completions.create({
  ...given,
  max_tokens: CALL_TOKENS,
  messages: [QUESTION],
  response_format: FORM,
});
assert.ok(isPet(JSON.parse(formed.choices[0].message.content)));

// Streams: of a text, and the event of a call that is done.
let text = "";
for await (const chunk of await client.chat.completions.create({ ...given, messages: [QUESTION], stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, first.content);
const done = [];
const stream = client.chat.completions.stream({ ...call, messages: [QUESTION] });
stream.on("tool_calls.function.arguments.done", (event) => done.push(event.name));
await stream.finalChatCompletion();
assert.deepEqual(done, ["get_weather"]);
