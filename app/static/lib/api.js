// Calls of the HTTP API. Each one takes the key from memory, and throws `ApiError` where the server refuses.
import { AWAY, connection, key, whileKeyed } from "../state/connection.js";

/** What the server refused, or that it is away: then `status` is 0. `param` names the field, if one was wrong.
 * `retryAfter` is in seconds, or null. `asked` and `told` are when the answer was asked for and came, in milliseconds. */
export class ApiError extends Error {
  constructor(status, { message, param = null }, retryAfter = null) {
    super(message);
    const told = performance.now();
    Object.assign(this, { status, param, retryAfter, asked: told, told });
  }
}

/** Throws that error if there is no value: the page's own refusal. */
export function need(value, empty) {
  if (!value) throw new ApiError(0, empty);
}

/** The parsed JSON of an answer; null for an answer without a body. `query` leaves out what is null. */
export async function call(method, path, { body, query, signal } = {}) {
  const answer = await request(method, path, { json: body, query, signal });
  return answer.status === 204 ? null : answer.json().catch(dropped);
}

/** An answer whose body is still to come, as a `Response`. */
export const open = (path, options) => request("GET", path, options);

/** Delete what is at the path; what is gone already is as well. */
export const erase = (path) => call("DELETE", path).catch((error) => {
  if (error.status !== 404) throw error;
});

/** The bytes of an answer, as an ArrayBuffer. */
export const download = async (method, path, { body, query } = {}) => (await request(method, path, { json: body, query })).arrayBuffer();

/** Opens a session, or forks the one at the path `from`, gives its path to `use`, and closes it. Returns what `use` does. */
export async function scratch(name, use, from = null) {
  const { id } = await (from ? call("POST", `${from}/fork`) : call("POST", "/v1/sessions", { body: { ttl_s: 600, metadata: { name } } }));
  const path = `/v1/sessions/${id}`;
  try {
    return await use(path);
  } finally {
    await call("DELETE", path).catch(() => {}); // it closes by itself
  }
}

/** Send bytes; the parsed JSON of the answer. */
export const upload = async (method, path, bytes, query) => (await request(method, path, { bytes, query })).json();

/** Tell `onEvent({name, id, data})` of each server-sent event of an answer, until it ends. `onOpen` gets its
 * `Response`. */
export async function stream(method, path, { body, headers, signal, onOpen, onEvent }) {
  const answer = await request(method, path, { json: body, headers, signal });
  onOpen?.(answer);
  await readEvents(answer.body, onEvent);
}

/** Ends with `signal`, and when another key is entered: what was asked for with the one before is not for that. */
async function request(method, path, { json, bytes, form, query, headers, signal } = {}) {
  const ends = signal ? AbortSignal.any([signal, whileKeyed()]) : whileKeyed();
  const init = { method, signal: ends, headers: { ...headers }, cache: "no-store", body: bytes };
  if (key.value) init.headers.Authorization = `Bearer ${key.value}`;
  if (json !== undefined) init.body = JSON.stringify(json);
  if (form) init.body = form; // the browser says of which kind it is
  else if (init.body !== undefined) init.headers["Content-Type"] = json ? "application/json" : "application/octet-stream";
  const answer = await fetch(address(path, query), init).catch(dropped);
  if (answer.ok) return answer;
  const retryAfter = Number(answer.headers.get("Retry-After")) || null;
  throw new ApiError(answer.status, await refusal(answer), retryAfter);
}

/** A dropped connection is a TypeError. */
function dropped(error) {
  throw error instanceof TypeError ? Object.assign(new ApiError(0, { message: AWAY }), { during: connection.peek() }) : error;
}

/** The URL of a path of the API. */
export function address(path, query = {}) {
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

/** Post a form with files; the parsed JSON of the answer. */
export const post = async (path, form) => (await request("POST", path, { form })).json();

/** Tell `onEvent` of each event in a stream of bytes. The server writes each field of it in one line, and its data as
 * JSON; what has no data is no event. */
async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const { event, id = null, data } = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (data) onEvent({ name: event, id, data: JSON.parse(data) });
    }
  }
}
