// What has happened to each session: while this page was open, and before, as the server remembers it.
import { call } from "../lib/api.js";
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

/** Entries of one answer. */
const ENTRIES = 200;

/** The signal of `{entries, hasMore}`: those of the session's timeline, newest first, and whether there are older ones. */
export const pastOf = perSession({ entries: [], hasMore: false });

/** Ask for the newest ones, or for those before the oldest that is known. Older ones stay, unless some between them and
 * the newest are unknown. */
export async function loadPast(id, isEarlier, signal) {
  const past = pastOf(id);
  const query = { limit: ENTRIES, before: isEarlier ? past.peek().entries.at(-1)?.id : null };
  const { data, has_more: hasMore } = await call("GET", `/v1/sessions/${id}/timeline`, { query, signal });
  const known = past.peek();
  const same = known.entries.findIndex((each) => each.id === data.at(-1)?.id);
  if (isEarlier) past.value = { entries: [...known.entries, ...data], hasMore };
  else past.value = same < 0 ? { entries: data, hasMore } : { ...known, entries: [...data, ...known.entries.slice(same + 1)] };
}

/** What they say, as `happeningsOf` has it: oldest first, up to `end`. Of a turn that ended later only its beginning is there. What
 * the live stream has no word for is a `past` with the entry as its data. */
export function happeningsBefore(end, entries) {
  const found = [];
  let [last, paused] = [0, Infinity];
  for (const entry of [...entries].reverse()) {
    if (entry.kind === "turn") {
      found.push(...turn(entry, last, paused));
      [last, paused] = [entry.at, Infinity];
    } else if (entry.kind === "paused") {
      found.push({ time: entry.at, name: "pause", data: { checkpoint: entry } });
      paused = Math.min(paused, entry.at);
    } else found.push({ time: entry.at, name: "past", data: entry });
  }
  return found.filter(({ time }) => time < end).sort((one, other) => one.time - other.time);
}

/** A turn that waited or ran for as long as the entry says, but not since before the `last` one's end: times are rounded.
 * Of one that a restart ended only the pause is known. */
function turn(entry, last, paused) {
  const { at, queue_ms: queue, restore_ms: restore, prefill_ms: prefill } = entry;
  const from = Math.max(last, Math.min(at - (entry.seconds ?? 0), paused - 0.001));
  return [
    { time: from, name: "past", data: { kind: "begun", phase: "compute" } },
    { time: from, name: "turn", data: { status: "begun" } },
    { time: at, name: "turn", data: { ...entry, usage: entry.status === "failed" ? null : entry, resume_ms: { queue, restore, prefill } } },
  ];
}
