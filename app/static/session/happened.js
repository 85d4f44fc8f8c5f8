// Reads what has happened to a session: as lanes of a timeline, and in words.
import { isSeen } from "../state/happenings.js";
import { moment } from "../lib/clock.js";
import { bytes, counted, milliseconds, number, place, positions, seconds } from "../lib/format.js";

/** `{state, phase, tier, turns, pauses}`. The first three are spans `{from, to, value, kv}`, one after the other; times
 * are Unix seconds, and the last span of each ends `now`. A turn is `{from, to, status, reason, usage, waits}`: `to` is
 * null while it runs, `waits` is what it waited for, in milliseconds, as soon as it is over. A pause is `{time, layer}`. */
export function lanesOf(happenings, now) {
  const lanes = { state: [], phase: [], tier: [], turns: [], pauses: [] };
  for (const happening of happenings) TAKE[happening.name]?.(lanes, happening);
  for (const lane of [lanes.state, lanes.phase, lanes.tier]) if (lane.length) lane.at(-1).to = now;
  return lanes;
}

const TAKE = {
  session({ state, phase, tier, turns, pauses }, happening) {
    const { time, data: { session } } = happening;
    const stands = !state.length && session.state === "paused" && pauses.at(-1)?.time; // since before the page opened
    extend(state, stands || time, session.state);
    extend(phase, time, session.phase);
    extend(tier, time, session.kv.tier ?? "none", session.kv);
    if (isSeen(happening) && session.state === "idle") endUnseen(turns, time);
  },
  turn({ turns }, { time, data }) {
    if (data.status === "begun") {
      endUnseen(turns, time);
      turns.push({ from: time, to: null, status: "running", reason: null, usage: null, waits: null });
      return;
    }
    const last = turns.at(-1);
    if (last?.to !== null) return; // it had begun before anybody looked
    Object.assign(last, { to: time, status: data.status, reason: data.finish_reason ?? data.code, usage: data.usage, waits: data.resume_ms });
  },
  pause({ pauses }, { time, data }) {
    pauses.push({ time, layer: data.checkpoint.layer });
  },
  past({ phase, tier }, { time, data }) {
    if (data.phase) extend(phase, time, data.phase);
    if (data.kind in CAME || data.kind === "moved") extend(tier, time, data.tier ?? "none");
  },
};

/** The end of a turn was told while the page did not hear. */
function endUnseen(turns, time) {
  const last = turns.at(-1);
  if (last?.to === null) Object.assign(last, { to: time, status: "unseen", reason: "ended unseen" });
}

function extend(lane, time, value, kv = null) {
  const last = lane.at(-1);
  if (last) last.to = time;
  if (last?.value === value) last.kv = kv;
  else lane.push({ from: time, to: time, value, kv });
}

/** `{time, what, details}`, newest first. */
export function rowsOf(happenings) {
  const rows = [];
  let before = null;
  for (const { time, name, data } of happenings) {
    const said = name === "session" ? changes(before, data.session) : (WORDS[name]?.(data) ?? []);
    for (const [what, details] of said) rows.push({ time, what, details });
    if (name === "session") before = data.session;
  }
  return rows.reverse();
}

const WORDS = {
  edit: ({ layer }) => [["Checkpoint edited", `after layer ${layer}`]],
  breakpoints: ({ armed }) => [["Breakpoints changed", `${armed.length} armed`]],
  turn: (turn) => [TURNS[turn.status](turn)],
  pause: ({ checkpoint }) => [
    [`Paused after layer ${checkpoint.layer}`, pausedAt(checkpoint)],
  ],
  past: (entry) => PAST[entry.kind]?.(entry) ?? [[CAME[entry.kind], entry.tokens ? counted(entry.tokens, "token") : ""]],
};

/** The server's timeline does not keep the positions. */
const pausedAt = ({ first, end, breakpoint }) => (end ? positions({ first, end }) : "") + (breakpoint ? `, at ${breakpoint}` : "");

const CAME = { opened: "Opened", restored: "The server came back", arrived: "Came from another server" };

/** Entries of the server's own timeline, which knows more and less than the live stream. */
const PAST = {
  begun: () => [],
  closed: () => [["Closed", ""]],
  departed: () => [["Went to another server", ""]],
  phase: ({ phase, returns_at: at }) => [[`Phase ${phase}`, at ? `back at ${moment(at)}` : ""]],
  moved: ({ tier, tokens }) => [[`KV ${place({ tier })}`, tokens ? counted(tokens, "token") : ""]],
};

const TURNS = {
  begun: () => ["Turn begun", ""],
  finished: ({ finish_reason, usage, late_s: late }) => [
    `Turn finished: ${finish_reason}`,
    `${counted(usage.completion_tokens, "token")} generated, ${number(usage.cached_tokens)} of ` +
      `${number(usage.prompt_tokens)} cached, ${number(usage.tokens_recomputed)} recomputed` +
      (late > 0 ? `, ${seconds(late)} late` : ""),
  ],
  failed: ({ code }) => ["Turn failed", code],
};

/** What differs between two views of a session. */
function changes(before, after) {
  if (before === null) return [["First seen", `${after.state}, phase ${after.phase}, KV ${place(after.kv)}`]];
  const said = [];
  if (before.phase !== after.phase) said.push([`Phase ${after.phase}`, `was ${before.phase}`]);
  if (before.kv.tier !== after.kv.tier) said.push([`KV ${place(after.kv)}`, moved(before, after)]);
  if (before.state !== after.state && after.state === "queued") said.push(["In the queue", ""]);
  if (after.tokens < before.tokens) said.push(["Rewound", `from ${number(before.tokens)} to ${counted(after.tokens, "token")}`]);
  if (before.usage.restores < after.usage.restores) said.push(["Restored", restored(before.usage, after.usage)]);
  return said;
}

/** Bytes of the copy that `tier` means; one on its way still counts where it comes from. */
export function bytesThere({ tier, device_bytes, host_bytes, disk_bytes }) {
  if (tier === "device" || tier === "to_host") return device_bytes;
  return tier === "disk" ? disk_bytes : host_bytes || disk_bytes;
}

function moved({ usage: before }, { kv, usage: after }) {
  const out = after.bytes_out - before.bytes_out;
  const back = after.bytes_in - before.bytes_in;
  const parts = [];
  if (out > 0) parts.push(`${bytes(out)} left the device`);
  if (back > 0) parts.push(`${bytes(back)} came back`);
  return parts.length ? parts.join(", ") : bytes(bytesThere(kv));
}

const restored = (before, after) =>
  `${bytes(after.bytes_in - before.bytes_in)} for a turn that waited ${milliseconds(after.resume_ms.restore)}`;
