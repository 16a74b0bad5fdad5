// OpenAI's agents for Node, over chat completions.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { Agent, OpenAIChatCompletionsModel, Runner, setTracingDisabled, tool, user } from "@openai/agents";
import { z } from "zod";
import { MODEL, TEXT, TOKENS, CALL_TOKENS, CITY, getWeather, isPet } from "./questions.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = new OpenAIChatCompletionsModel(client, MODEL);
const runner = new Runner();
const short = { temperature: 0, maxTokens: TOKENS };

// Two turns.
const talker = new Agent({ name: "one", model, modelSettings: short });
const first = await runner.run(talker, TEXT);
const second = await runner.run(talker, [...first.history, user("And in Rome?")]);
assert.ok(second.finalOutput);

// Tools.
const weather = tool({
  name: "get_weather",
  description: "Weather of a city",
  parameters: CITY,
  strict: true,
  execute: getWeather,
});
const caller = new Agent({
  name: "two",
  model,
  tools: [weather],
  toolUseBehavior: "stop_on_first_tool",
  modelSettings: { ...short, maxTokens: CALL_TOKENS, toolChoice: "required" },
});
assert.match((await runner.run(caller, TEXT)).finalOutput, /It is sunny/);

// Structured output.
const former = new Agent({
  name: "three",
  model,
  outputType: z.object({ kind: z.enum(["cat", "dog"]) }),
  modelSettings: { ...short, maxTokens: CALL_TOKENS },
});
assert.ok(isPet((await runner.run(former, TEXT)).finalOutput));

// Streams.
const streamed = await runner.run(talker, TEXT, { stream: true });
let text = "";
for await (const part of streamed.toTextStream()) text += part;
await streamed.completed;
assert.equal(text, first.finalOutput);
