// Short messages for people: what a button has done, or why it could not.
import { perKey } from "./per_key.js";

const SHOWN_MS = 6000;
let last = 0;

/** `{id, kind, text}`, oldest first. `kind` is `done` or `error`; errors stay until they are closed. */
export const notices = perKey([]);

export function say(text, kind = "done") {
  if (kind === "error" && notices.value.some((each) => each.text === text)) return; // it is still there
  const id = (last += 1);
  notices.value = [...notices.value.slice(-3), { id, kind, text }];
  if (kind === "done") setTimeout(() => dismiss(id), SHOWN_MS);
}

export const dismiss = (id) => (notices.value = notices.value.filter((each) => each.id !== id));

/** An error becomes a message, with `what` in front of it. */
export const complain = (what, error) => error.name !== "AbortError" && say(`${what}: ${error.message}`, "error");

const underWay = new Set();

/** Run what a button does, unless it is under way, and complain if it fails. */
export async function attempt(what, action) {
  if (underWay.has(what)) return;
  underWay.add(what);
  await action().catch((error) => complain(what, error));
  underWay.delete(what);
}
