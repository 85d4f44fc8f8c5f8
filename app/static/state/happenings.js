// What has happened to each session while this page was open.
import { perSession } from "./per_key.js";
import { ids, sessionOf } from "./sessions.js";

/** Most that are kept of one session, and about how many of all. */
const KEPT = 500;
const KEPT_TOGETHER = 50_000;
let last = 0;

/** The signal of what happened to a session, oldest first: `{number, time, name, data}`, with `time` in Unix seconds, and
 * `name` and `data` those of the live stream. A view in it is as `seen` makes it. Numbers grow. A new array with each. */
export const happeningsOf = perSession([]);

/** `data` is that of an event. */
export function note(id, name, data) {
  if (sessionOf(id).peek() === null) return; // the last word on a session that is gone
  const log = happeningsOf(id);
  const kept = Math.ceil(Math.min(KEPT, KEPT_TOGETHER / ids.peek().length));
  const said = name === "session" ? { change: data.change, session: seen(data.session) } : data;
  const before = log.value.at(-1);
  const happening = { number: (last += 1), time: data.time, name, data: said };
  if (name === "edit" && before?.name === name) log.value = [...log.value.slice(0, -1), happening];
  else if (isMore(before, happening)) log.value = [...log.value.slice(0, -1), { ...before, data: { ...before.data, session: said.session } }];
  else log.value = [...log.value.slice(-kept), happening];
}

/** What is kept of a view. */
const seen = ({ state, phase, tokens, kv, usage }) => ({ state, phase, tokens, kv, usage });

/** Whether nothing has happened since `before` but that there are more tokens. */
function isMore(before, { name, data }) {
  if (before?.name !== "session" || name !== "session" || data.change !== "changed") return false;
  const [old, fresh] = [before.data.session, data.session];
  const isSame = ["state", "phase"].every((each) => old[each] === fresh[each]);
  return isSame && old.kv.tier === fresh.kv.tier && old.usage.restores === fresh.usage.restores && old.tokens <= fresh.tokens;
}

/** The number of the last that is one of those; 0 if none is known. A history or a list that depends on them is old when
 * this changes. */
export const lastOf = (happenings, isOne) => happenings.findLast(isOne)?.number ?? 0;

/** Whether it is what a snapshot told: more may have happened since the one before than the page was told of. */
export const isSeen = ({ name, data }) => name === "session" && data.change === "seen";
