// One chat: its messages, and the answer that is being streamed.

import { stream } from "./api.js";
import { opening, sampling } from "./settings.js";
import { Answer, clear, show, showError } from "./transcript.js";

export class Chat {
  /** `onChange` is called when an answer begins or ends. */
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.messages = [];
    // What the page shows, each with the number of messages that came before it.
    this.shown = [];
    this.abort = null;
    // The answer whose calls wait for what the tools say.
    this.calling = null;
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Whether the last answer can be generated once more. */
  get hasAnswer() {
    return this.shown.some((each) => each.isAnswer);
  }

  reset() {
    this.stop();
    this.messages = [];
    this.shown = [];
    this.abort = this.calling = null;
    clear();
    this.onChange();
  }

  stop() {
    this.abort?.abort();
  }

  async ask(text) {
    this.withdrawCalls();
    this.note(show("user", text), false);
    this.messages.push({ role: "user", content: text });
    await this.answer();
  }

  /** Generate the last answer anew, with the settings of now. */
  async again() {
    this.withdrawCalls();
    while (this.shown.length) {
      const { view, before, isAnswer } = this.shown.pop();
      view.remove();
      this.messages.length = before;
      if (isAnswer) break;
    }
    await this.answer();
  }

  withdrawCalls() {
    this.calling?.withdrawCalls();
    this.calling = null;
  }

  note(view, isAnswer) {
    this.shown.push({ view, before: this.messages.length, isAnswer });
  }

  async answer() {
    let body;
    try {
      body = {
        model: this.model(),
        messages: [...opening(), ...this.messages],
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
        ...sampling(),
      };
    } catch (error) {
      this.note(showError(error.message), true);
      this.onChange();
      return;
    }
    const abort = (this.abort = new AbortController());
    const view = new Answer();
    this.note(view, true);
    this.onChange();
    const reply = new Reply(view);
    try {
      for await (const event of stream("v1/chat/completions", body, abort.signal)) reply.take(event);
    } catch (error) {
      if (error.name !== "AbortError") view.addError(error.message);
    }
    view.finish();
    if (this.abort !== abort) return; // Another chat has begun.
    this.abort = null;
    reply.end(abort.signal.aborted);
    this.keep(reply, view);
    this.onChange();
  }

  keep(reply, view) {
    const calls = reply.calls;
    if (!reply.text && !calls.length) return;
    this.messages.push({ role: "assistant", content: reply.text, ...(calls.length && { tool_calls: calls }) });
    if (calls.length && reply.finishReason === "tool_calls") {
      this.calling = view;
      view.askForResults((results) => {
        this.calling = null;
        results.forEach((content, index) => {
          this.messages.push({ role: "tool", tool_call_id: calls[index].id, content });
        });
        this.answer();
      });
    }
  }
}

/** What a stream of chunks adds up to. */
class Reply {
  constructor(view) {
    this.view = view;
    this.text = "";
    this.calls = [];
    this.finishReason = null;
    this.tokens = 0;
    this.asked = performance.now();
    this.first = this.last = null;
  }

  take(event) {
    const choice = event.choices[0];
    if (event.usage) this.tokens = event.usage.completion_tokens;
    if (choice) this.takeChoice(choice);
    if (this.first !== null) this.view.setFigures(this.figures());
  }

  takeChoice({ delta, finish_reason: reason }) {
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) this.view.addReasoning(thought);
    if (delta.content) {
      this.text += delta.content;
      this.view.addText(delta.content);
    }
    for (const part of delta.tool_calls ?? []) this.takeCall(part);
    if (thought || delta.content || delta.tool_calls?.length || reason) {
      this.last = performance.now();
      this.first ??= this.last;
    }
    this.finishReason = reason ?? this.finishReason;
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    this.view.addCall(part);
  }

  end(wasStopped) {
    if (wasStopped) this.finishReason = "stopped here";
    this.view.setFigures(this.figures());
  }

  figures() {
    const parts = [];
    if (this.first !== null) parts.push(`first token after ${Math.round(this.first - this.asked)} ms`);
    const seconds = (this.last - this.first) / 1000;
    if (this.tokens > 1 && seconds > 0) parts.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.tokens) parts.push(`${this.tokens} tokens`);
    if (this.finishReason) parts.push(this.finishReason);
    return parts.join(" · ");
  }
}
