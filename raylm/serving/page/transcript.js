// The messages on the page.

import { GrowingText, byId, element } from "./dom.js";

const NEAR = 60;
const log = byId("transcript");

export function clear() {
  log.replaceChildren();
}

/** A message that is whole; `remove` takes it away. */
export function show(role, text) {
  const box = element("div", `message ${role}`, element("div", "role", role), element("div", "text", text));
  place(box);
  return box;
}

export function showError(text) {
  const box = element("div", "message", element("div", "error", text));
  box.setAttribute("role", "alert");
  place(box);
  return box;
}

/** An answer that grows. */
export class Answer {
  constructor() {
    this.box = element("div", "message assistant", element("div", "role", "assistant"));
    this.calls = [];
    this.fields = [];
    this.texts = [];
    this.content = this.reasoning = this.figures = null;
    place(this.box);
  }

  addReasoning(text) {
    if (!this.reasoning) {
      const body = element("div", "text");
      const details = element("details", "reasoning", element("summary", "", "Reasoning"), body);
      details.open = true;
      this.box.append(details);
      this.reasoning = this.growing(body);
    }
    this.reasoning.push(text);
  }

  addText(text) {
    if (!this.content) {
      const body = element("div", "text");
      this.box.append(body);
      this.content = this.growing(body);
    }
    this.content.push(text);
  }

  /** An entry of a delta's tool_calls: the first of a call has its name, the others go on with its arguments. */
  addCall(part) {
    let call = this.calls[part.index];
    if (!call) {
      const body = element("pre", "");
      const name = element("strong", "");
      const box = element("div", "call", "calls ", name, body);
      this.box.append(box);
      call = this.calls[part.index] = { box, name, text: this.growing(body) };
    }
    if (part.function?.name) call.name.append(document.createTextNode(part.function.name));
    if (part.function?.arguments) call.text.push(part.function.arguments);
  }

  /** Fields for what the tools said; `onGiven` gets one text a call. */
  askForResults(onGiven) {
    this.fields = this.calls.map((call) => {
      const field = element("textarea", "");
      field.rows = 2;
      field.placeholder = "What the tool answers";
      field.setAttribute("aria-label", `Result of ${call.name.textContent}`);
      call.box.append(field);
      return field;
    });
    const button = element("button", "", "Send results");
    button.type = "button";
    button.addEventListener("click", () => {
      const results = this.fields.slice(0, this.calls.length).map((field) => field.value);
      this.calls.forEach((call, index) => call.box.append(element("pre", "", results[index])));
      this.withdrawCalls();
      onGiven(results);
    });
    this.box.append(button);
    this.fields.push(button);
  }

  /** Take the fields away: nobody waits for results any more. */
  withdrawCalls() {
    for (const field of this.fields.splice(0)) field.remove();
  }

  setFigures(text) {
    this.figures ??= element("div", "figures");
    this.figures.textContent = text;
    follow(() => this.box.append(this.figures));
  }

  addError(text) {
    this.box.append(element("div", "error", text));
  }

  /** Write what still waits for a frame: the answer is complete. */
  finish() {
    for (const text of this.texts) text.write();
  }

  remove() {
    this.box.remove();
  }

  growing(body) {
    const text = new GrowingText(body, () => follow(() => {}));
    this.texts.push(text);
    return text;
  }
}

function place(box) {
  log.append(box);
  log.scrollTop = log.scrollHeight;
}

/** Change the end of the log; who reads it there stays there, who reads further up is left alone. */
let following = true;
log.addEventListener("scroll", () => {
  following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
});
function follow(change) {
  change();
  if (following) log.scrollTop = log.scrollHeight;
}
