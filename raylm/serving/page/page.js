// The page: a chat with the server's models, beside it the server's state.

import { get } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { watch } from "./state.js";
import { showError } from "./transcript.js";

const select = byId("model");
const prompt = byId("prompt");
const chat = new Chat(() => select.value, update);

function update() {
  byId("send").disabled = chat.isBusy || !select.value;
  byId("stop").disabled = !chat.isBusy;
  byId("again").disabled = chat.isBusy || !chat.hasAnswer;
}

function send(event) {
  event.preventDefault();
  const text = prompt.value;
  if (chat.isBusy || !text.trim() || !select.value) return;
  prompt.value = "";
  chat.ask(text);
}

async function listModels() {
  const chosen = select.value;
  const names = (await get("v1/models")).data.map((card) => card.id);
  select.replaceChildren(...names.map((name) => option(name)));
  if (names.includes(chosen)) select.value = chosen;
  update();
}

function option(name) {
  const made = element("option", "", name);
  made.value = name;
  return made;
}

byId("ask").addEventListener("submit", send);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
byId("stop").addEventListener("click", () => chat.stop());
byId("again").addEventListener("click", () => chat.again());
byId("new").addEventListener("click", () => chat.reset());
byId("settings").addEventListener("submit", (event) => event.preventDefault());

update();
let known = "";
watch((models) => {
  // A model may become ready, or go, while the page is open.
  const ready = JSON.stringify(models.filter((model) => model.ready).map((model) => model.model));
  if (ready === known) return;
  known = ready;
  listModels().catch((error) => showError(error.message));
});
