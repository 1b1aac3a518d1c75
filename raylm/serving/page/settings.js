// The sampling fields: what a request says of them. An empty one is left out, so that the model's default holds.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const form = byId("settings");

/** Fields of a request's body. Raises Error with a sentence for a field that is not valid. */
export function sampling() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = form.elements[name];
    if (!input.checkValidity()) throw new Error(`${name}: ${input.validationMessage}`);
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const tools = form.elements.tools.value.trim();
  if (tools) fields.tools = parsed(tools);
  return fields;
}

/** The messages that stand before every chat. */
export function opening() {
  const system = form.elements.system.value;
  return system.trim() ? [{ role: "system", content: system }] : [];
}

function parsed(tools) {
  try {
    return JSON.parse(tools);
  } catch (error) {
    throw new Error(`Tools are no JSON: ${error.message}`);
  }
}
