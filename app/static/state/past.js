// What happened to each session before this page opened, as the server remembers it.
import { call } from "../lib/api.js";
import { perSession } from "./per_key.js";

/** Entries of one answer. */
const ENTRIES = 200;

/** The signal of `{entries, hasMore}`: those of the session's timeline, newest first, and whether there are older ones. */
export const pastOf = perSession({ entries: [], hasMore: false });

/** Ask for the newest ones, or for those before the oldest that is known. */
export async function loadPast(id, isEarlier, signal) {
  const known = isEarlier ? pastOf(id).peek().entries : [];
  const query = { limit: ENTRIES, before: known.at(-1)?.id };
  const { data, has_more: hasMore } = await call("GET", `/v1/sessions/${id}/timeline`, { query, signal });
  pastOf(id).value = { entries: [...known, ...data], hasMore };
}

/** What they say, as `happeningsOf` has it: oldest first, up to `end`. Of a turn that ended later only its beginning is there. What
 * the live stream has no word for is a `past` with the entry as its data. */
export function happeningsBefore(end, entries) {
  const found = [];
  let last = 0;
  for (const entry of [...entries].reverse()) {
    if (entry.kind === "turn") {
      found.push(...turn(entry, last));
      last = entry.at;
    } else if (entry.kind === "paused") found.push({ time: entry.at, name: "pause", data: { checkpoint: entry } });
    else found.push({ time: entry.at, name: "past", data: entry });
  }
  return found.filter(({ time }) => time < end).sort((one, other) => one.time - other.time);
}

/** A turn that waited or ran for as long as the entry says, but not since before the `last` one's end: times are rounded. */
function turn(entry, last) {
  const { at, queue_ms: queue, restore_ms: restore, prefill_ms: prefill } = entry;
  const from = Math.max(last, at - (entry.seconds ?? 0));
  return [
    { time: from, name: "past", data: { kind: "begun", phase: "compute" } },
    { time: from, name: "turn", data: { status: "begun" } },
    { time: at, name: "turn", data: { ...entry, usage: entry.status === "failed" ? null : entry, resume_ms: { queue, restore, prefill } } },
  ];
}
