// Short messages for people: what a button has done, or why it could not.
import { computed } from "@preact/signals";
import { isPast } from "./connection.js";
import { perKey } from "./per_key.js";

const SHOWN_MS = 6000;
let last = 0;

const said = perKey([]);
/** `{id, kind, text}`, oldest first. `kind` is `done` or `error`; errors stay until they are closed, but for those that
 * the server was away. */
export const notices = computed(() => said.value.filter(({ error }) => !isPast(error)));

export function say(text, kind = "done", error = null) {
  if (kind === "error" && notices.value.some((each) => each.text === text)) return; // it is still there
  const id = (last += 1);
  said.value = [...notices.value.slice(-3), { id, kind, text, error }];
  if (kind === "done") setTimeout(() => dismiss(id), SHOWN_MS);
}

export const dismiss = (id) => (said.value = said.value.filter((each) => each.id !== id));

/** An error becomes a message, with `what` in front of it. */
export const complain = (what, error) => error.name !== "AbortError" && say(`${what}: ${error.message}`, "error", error);

const underWay = new Set();

/** Run what a button does, unless it is under way, and complain if it fails. */
export async function attempt(what, action) {
  if (underWay.has(what)) return;
  underWay.add(what);
  await action().catch((error) => complain(what, error));
  underWay.delete(what);
}
