// Server-sent events out of a fetch's body: EventSource can neither post nor send a key.

/** The `data` of each event, as text. Lines of comments (":") and other fields are skipped. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) {
        data.push(line.slice(line[5] === " " ? 6 : 5));
      } else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
