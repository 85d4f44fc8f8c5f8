// What has been typed for a session and not been sent yet, and how it becomes the body of a turn.
import { ApiError } from "../lib/api.js";
import { perSession } from "../state/per_key.js";

/** What the fields of a turn are called, and what they say when they are empty. All are text until they are sent: the
 * server judges them. `main` ones are always shown. */
export const FIELDS = [
  { name: "max_tokens", label: "Most tokens", hint: "room left", main: true },
  { name: "temperature", label: "Temperature", hint: "the model’s", main: true },
  { name: "seed", label: "Seed", hint: "drawn", main: true },
  { name: "top_p", label: "Top p", hint: "the model’s" },
  { name: "top_k", label: "Top k", hint: "the model’s" },
  { name: "min_p", label: "Min p", hint: "the model’s" },
  { name: "min_tokens", label: "Fewest tokens", hint: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "the model’s" },
  { name: "presence_penalty", label: "Presence penalty", hint: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0" },
];

const FRESH = { kind: "prompt", role: "user", text: "", values: { max_tokens: "128" }, stop: "", ignoreEos: false, other: "", more: false };

/** The signal of a session's draft. `kind` is `prompt`, `message` or `nothing` (go on from the history as it is). */
export const draftOf = perSession(FRESH);

/** The body of `generate`. Throws an `ApiError` that names the field where a text cannot be sent. */
export function bodyOf(draft) {
  const body = { ...other(draft.other), ...input(draft) };
  for (const { name } of FIELDS) {
    const text = (draft.values[name] ?? "").trim();
    if (text) body[name] = number(name, text);
  }
  const stop = draft.stop.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  if (draft.ignoreEos) body.ignore_eos = true;
  return body;
}

function input({ kind, role, text }) {
  if (kind === "message") return { messages: [{ role, content: text }] };
  if (kind === "nothing") return { token_ids: [] };
  if (text) return { prompt: text };
  throw refusal("prompt", "prompt: write what comes next, or choose “Go on”");
}

/** A text that is no number goes as it is: the server says which are allowed. */
function number(name, text) {
  const value = Number(text);
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw refusal(name, `${name}: this page sends integers up to ${Number.MAX_SAFE_INTEGER}; got ${text}`);
  }
  return Number.isFinite(value) ? value : text;
}

function other(text) {
  if (!text.trim()) return {};
  try {
    const fields = JSON.parse(text);
    if (fields !== null && typeof fields === "object" && !Array.isArray(fields)) return fields;
  } catch {
    // told below
  }
  throw refusal("other", 'other fields: a JSON object, such as {"structured_outputs": {"regex": "[0-9]+"}}');
}

const refusal = (param, message) => new ApiError(0, { message, param });
