// What has happened to each session while this page was open.
import { perSession } from "./per_session.js";
import { ids, sessionOf } from "./sessions.js";

/** Most that are kept of one session, and about how many of all. */
const KEPT = 500;
const KEPT_TOGETHER = 50_000;

/** The signal of what happened to a session, oldest first: `{time, name, data}`, with `time` in Unix seconds and `name`
 * and `data` those of the live stream. A new array with each. */
export const happeningsOf = perSession([]);

export function note(id, name, data) {
  if (sessionOf(id).peek() === null) return; // the last word on a session that is gone
  const log = happeningsOf(id);
  const kept = Math.ceil(Math.min(KEPT, KEPT_TOGETHER / ids.peek().length));
  log.value = [...log.value.slice(-kept), { time: Date.now() / 1000, name, data }];
}
