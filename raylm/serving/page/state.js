// The server's state beside the chat, while the page is looked at.

import { get } from "./api.js";
import { byId, element } from "./dom.js";

const EVERY_MS = 2000;
const panel = byId("state");

/** Look now, and again and again; `onModels` gets the state of each model. */
export async function watch(onModels) {
  for (;;) {
    if (!document.hidden) {
      try {
        const state = await get("state");
        panel.replaceChildren(...state.models.map(model), element("p", "hint", `raylm ${state.version}`));
        onModels(state.models);
      } catch (error) {
        panel.replaceChildren(element("p", "error", error.message));
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

function model(state) {
  const rows = [
    ["replicas", state.ready ? state.replicas : `${state.replicas}, not ready`],
    ["running", state.running],
    ["waiting", state.waiting],
    ["cache in use", state.cache_usage === null ? "–" : `${(100 * state.cache_usage).toFixed(1)} %`],
    ["tokens/s", state.tokens_per_s === null ? "–" : state.tokens_per_s.toFixed(1)],
  ];
  const lines = rows.map(([name, value]) => element("tr", "", element("th", "", name), element("td", "", value)));
  return element("div", "model", element("h3", "", state.model), element("table", "", element("tbody", "", ...lines)));
}
