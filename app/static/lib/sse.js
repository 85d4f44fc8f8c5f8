// Server-sent events over `fetch`: `EventSource` cannot send a key. https://html.spec.whatwg.org/multipage/server-sent-events.html

/** Tell `onEvent({name, id, data})` of each event in a stream of bytes; `data` is parsed JSON where it is JSON. */
export async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event !== null) onEvent(event);
    }
  }
}

function parse(block) {
  const event = { name: "message", id: null };
  const lines = [];
  for (const line of block.split("\n")) {
    const [field, value] = split(line);
    if (field === "event") event.name = value;
    else if (field === "id") event.id = value;
    else if (field === "data") lines.push(value);
  }
  if (lines.length === 0) return null;
  const text = lines.join("\n");
  try {
    event.data = JSON.parse(text);
  } catch {
    event.data = text;
  }
  return event;
}

function split(line) {
  const colon = line.indexOf(":");
  if (colon < 0) return [line, ""];
  return [line.slice(0, colon), line.slice(colon + 1).replace(/^ /, "")];
}
