// The question that every client asks, the tool that it offers, and the form that it asks for.
export const MODEL = "smollm2";
export const TEXT = "What is the weather in Paris?";
export const QUESTION = { role: "user", content: TEXT };
export const NEXT = { role: "user", content: "And in Rome?" };
export const TOKENS = 12;
export const CALL_TOKENS = 60;

const closed = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
export const CITY = closed({ city: { type: "string", enum: ["Paris", "Rome"] } });
export const PET = closed({ kind: { type: "string", enum: ["cat", "dog"] } });
export const TOOL = { type: "function", function: { name: "get_weather", parameters: CITY, strict: true } };
export const FORM = { type: "json_schema", json_schema: { name: "pet", schema: PET, strict: true } };
export const isPet = (value) => ["cat", "dog"].includes(value.kind);
export const getWeather = ({ city }) => `It is sunny in ${city}.`;
