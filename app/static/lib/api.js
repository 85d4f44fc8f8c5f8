// Calls of the HTTP API. Each one takes the key from memory, and throws `ApiError` where the server refuses.
import { key, whileKeyed } from "../state/connection.js";

/** What the server refused, or that it is away: then `status` is 0. `param` names the field, if one was wrong.
 * `retryAfter` is in seconds, or null. */
export class ApiError extends Error {
  constructor(status, { message, code = null, param = null }, retryAfter = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** The parsed JSON of an answer; null for an answer without a body. `query` leaves out what is null. */
export async function call(method, path, { body, query, signal } = {}) {
  const answer = await request(method, path, { json: body, query, signal });
  return answer.status === 204 ? null : answer.json();
}

/** The `bytes` of an answer, as an ArrayBuffer. */
export async function download(path, { query, signal } = {}) {
  return { bytes: await (await open(path, { query, signal })).arrayBuffer() };
}

/** An answer whose body is still to come, as a `Response`. */
export const open = (path, { query, signal } = {}) => request("GET", path, { query, signal });

/** Send bytes; the parsed JSON of the answer. */
export async function upload(method, path, bytes, { query, signal, type = "application/octet-stream" } = {}) {
  const answer = await request(method, path, { bytes, type, query, signal });
  return answer.json();
}

/** Tell `onEvent({name, id, data})` of each server-sent event of an answer, until it ends. `onOpen` gets its
 * `Response`. */
export async function stream(method, path, { body, headers, signal, onOpen, onEvent }) {
  const answer = await request(method, path, { json: body, headers, signal });
  onOpen?.(answer);
  await readEvents(answer.body, onEvent);
}

/** Ends with `signal`, and when another key is entered: what was asked for with the one before is not for that. */
async function request(method, path, { json, bytes, type, query, headers = {}, signal }) {
  const ends = signal ? AbortSignal.any([signal, whileKeyed()]) : whileKeyed();
  const init = { method, signal: ends, headers: { ...headers }, cache: "no-store" };
  if (key.value) init.headers.Authorization = `Bearer ${key.value}`;
  if (json !== undefined) {
    init.headers["Content-Type"] = "application/json";
    init.body = JSON.stringify(json);
  } else if (bytes !== undefined) {
    init.headers["Content-Type"] = type;
    init.body = bytes;
  }
  let answer;
  try {
    answer = await fetch(address(path, query), init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server is away.", code: "away" });
  }
  if (answer.ok) return answer;
  const retryAfter = Number(answer.headers.get("Retry-After")) || null;
  throw new ApiError(answer.status, await refusal(answer), retryAfter);
}

function address(path, query = {}) {
  const url = new URL(path.replace(/^\//, ""), document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  return url;
}

async function refusal(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return { message: `The server answered ${answer.status}.` };
  }
}

/** Tell `onEvent({name, id, data})` of each event in a stream of bytes; `data` is parsed JSON where it is JSON. */
async function readEvents(body, onEvent) {
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
