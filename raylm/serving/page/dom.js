// What is shown is made here: text only ever becomes text, never markup.

/** An element with a class and children; a child that is no node becomes text. */
export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const child of children) made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Text that grows: pieces that come within one frame are written at once. */
export class GrowingText {
  constructor(parent, onWritten) {
    this.node = document.createTextNode("");
    parent.append(this.node);
    this.pending = "";
    this.onWritten = onWritten;
  }

  push(text) {
    if (!this.pending) requestAnimationFrame(() => this.write());
    this.pending += text;
  }

  write() {
    if (!this.pending) return;
    this.node.appendData(this.pending);
    this.pending = "";
    this.onWritten();
  }
}
