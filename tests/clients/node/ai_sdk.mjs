// The AI SDK of Vercel, with its provider of servers like OpenAI's.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { MODEL, NEXT, QUESTION, TEXT, TOKENS, CALL_TOKENS, CITY, PET, isPet, getWeather } from "./questions.mjs";

const provider = createOpenAICompatible({
  name: "opgraft",
  baseURL: process.argv[2],
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const given = { model: provider(MODEL), temperature: 0, maxOutputTokens: TOKENS, maxRetries: 0 };

// Two turns.
const first = await generateText({ ...given, messages: [QUESTION] });
const second = await generateText({ ...given, messages: [QUESTION, ...first.response.messages, NEXT] });
assert.ok(second.text);

// Tools.
const weather = tool({ description: "Weather of a city", inputSchema: jsonSchema(CITY), execute: getWeather });
const called = await generateText({
  ...given,
  maxOutputTokens: CALL_TOKENS,
  prompt: TEXT,
  tools: { get_weather: weather },
  toolChoice: "required",
});
assert.match(called.toolResults[0].output, /It is sunny/);

// Structured output.
const formed = await generateObject({ ...given, maxOutputTokens: CALL_TOKENS, prompt: TEXT, schema: jsonSchema(PET) });
assert.ok(isPet(formed.object));

// Streams.
let text = "";
for await (const part of streamText({ ...given, prompt: TEXT }).textStream) text += part;
assert.equal(text, first.text);
