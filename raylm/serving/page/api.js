// Calls of the server that this page came from. The key lives in this module's memory and nowhere else.

import { byId } from "./dom.js";
import { events } from "./sse.js";

const BASE = new URL(".", document.baseURI);
let key = "";
let asking = null;

/** GET: the JSON of the answer. Asks for a key where the server wants one. */
export async function get(path) {
  return (await call(path, {})).json();
}

/** POST: each event of the stream, parsed. Raises Error, in the middle of it too, with the server's sentence. */
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

async function call(path, options) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers, ...(used && { authorization: `Bearer ${used}` }) };
    const response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    const reason = await message(response);
    if (response.status !== 401) throw new Error(reason);
    // Another call may have got a key in the meantime.
    if (key === used) await askForKey(used ? reason : "This server wants an API key.");
  }
}

async function message(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** Resolves when there is a key; calls that fail at the same time share one dialog. */
function askForKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("ask-key");
    const field = byId("key");
    byId("key-reason").textContent = reason;
    field.value = "";
    const close = () => {
      key = field.value.trim();
      field.value = "";
      if (!key) return dialog.showModal();
      dialog.removeEventListener("close", close);
      asking = null;
      resolve();
    };
    dialog.addEventListener("close", close);
    dialog.showModal();
  });
  return asking;
}
