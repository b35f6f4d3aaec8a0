// Vercel's `ai`, with its two providers for servers of this kind: text, streams, objects, tools.
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { HEADWAY_URL: BASE_URL, HEADWAY_MODEL: MODEL } = process.env;
const KEY = "none";
// settings
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const compatible = createOpenAICompatible({
  name: "headway", baseURL: BASE_URL, apiKey: KEY, supportsStructuredOutputs: true, includeUsage: true,
});
const openai = createOpenAI({ baseURL: BASE_URL, apiKey: KEY });
const models = { compatible: compatible(MODEL), chat: openai.chat(MODEL), responses: openai.responses(MODEL) };
const providerOptions = { openai: { store: false } }; // else it refers to stored answers, and the server stores none
// end

const RULES = "You are a patient librarian. " +
  "Look things up before you answer, and never invent the title of a book. ".repeat(6);
const say = (step, came) => console.log("step " + JSON.stringify([step, JSON.stringify(came)?.slice(0, 200)]));
const book = z.object({ title: z.enum(["Walden", "Emma", "Dracula"]), year: z.number().int().min(1).max(2100) });
const look_up = tool({
  description: "Look up a shelf",
  inputSchema: z.object({ shelf: z.enum(["north", "south"]) }),
  execute: async ({ shelf }) => `nothing on the ${shelf} shelf`,
});

for (const [name, model] of Object.entries(models)) {
  const asked = { model, system: RULES, maxOutputTokens: 48, providerOptions };
  const first = await generateText({ ...asked, prompt: "Who are you?" });
  say(`${name}: generateText`, first.text);
  const again = await generateText({ ...asked, prompt: "Who are you?" });
  say(`${name}: generateText again`, again.usage);
  const messages = [
    { role: "user", content: "Who are you?" }, ...first.response.messages, { role: "user", content: "What can you do?" },
  ];
  const stream = streamText({ ...asked, messages });
  let text = "";
  for await (const part of stream.textStream) text += part;
  if (!text) throw new Error("nothing came");
  say(`${name}: append and streamText`, text);
  say(`${name}: generateObject`, (await generateObject({ model, system: RULES, prompt: "A book?", schema: book })).object);
  const looked = await generateText({
    model, system: RULES, prompt: "Which shelf?", tools: { look_up }, toolChoice: "required",
    providerOptions: { openai: { ...providerOptions.openai, parallelToolCalls: false } }, stopWhen: stepCountIs(10),
  });
  say(`${name}: tools, ten steps`, [looked.steps.length, looked.steps.at(-1).toolCalls[0].input]);
}
