// What has happened to each session while this page was open.
import { signal } from "@preact/signals";

/** Most that are kept of one session. */
const KEPT = 500;
const logs = new Map();

/** The signal of what happened to a session, oldest first: `{time, name, data}`, with `time` in Unix seconds and `name`
 * and `data` those of the live stream. A new array with each. */
export function happeningsOf(id) {
  if (!logs.has(id)) logs.set(id, signal([]));
  return logs.get(id);
}

export function note(id, name, data) {
  const log = happeningsOf(id);
  log.value = [...log.value.slice(1 - KEPT), { time: Date.now() / 1000, name, data }];
}

/** Forget those of a session that is gone. */
export const forget = (id) => logs.delete(id);
