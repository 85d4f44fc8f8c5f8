// What happened to a session over time: lanes, what its turns waited for, all of it as a table, and how it is read so.
import { useEffect, useMemo } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { moment, second, serverTime } from "../lib/clock.js";
import { bytes, counted, milliseconds, number, place, positions, seconds, waits } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { happeningsBefore, happeningsOf, isSeen, loadPast, pastOf } from "../state/happenings.js";
import { attempt } from "../state/notices.js";
import { where } from "../state/points.js";
import { heed, tell } from "../state/route.js";
import { turnWord } from "../state/sessions.js";

/** What can be looked at, in seconds; null is all. */
const RANGES = [["Everything known", null], ["Last day", 86_400], ["Last hour", 3600], ["Last 10 minutes", 600], ["Last minute", 60]];
const SHORTEST_S = 5;

/** `end` is when a session was closed, whose `usage` nobody knows. */
export function Timeline({ view, end = null }) {
  void second.value; // time goes on
  const range = useSignal(null);
  const now = end ?? serverTime();
  useEffect(() => heed((said) => (range.value = RANGES.find(([, span]) => span === Number(said.get("span")))?.[1] ?? null)), []);
  useEffect(() => tell({ span: range.value }), [range.value]);
  const happenings = useHappenings(view.id);
  const lanes = lanesOf(happenings, now);
  const table = useMemo(() => html`<${EventTable} rows=${rowsOf(happenings)} />`, [happenings]);
  const start = range.value === null ? Math.min(now - SHORTEST_S, happenings[0]?.time ?? now) : now - range.value;
  return html`
    <section class="panel timeline stack" aria-labelledby="timeline">
      <div class="row">
        <h2 id="timeline">Timeline</h2>
        <select aria-label="Time shown" value=${String(range.value)} onChange=${(event) => (range.value = JSON.parse(event.target.value))}>
          ${RANGES.map(([label, value]) => html`<option value=${String(value)}>${label}</option>`)}
        </select>
      </div>
      <${Lanes} lanes=${lanes} start=${start} now=${now} />
      <${Waits} turns=${lanes.turns} usage=${view.usage} />
      <details>
        <summary>As a table</summary>
        ${table}
        ${pastOf(view.id).value.hasMore && html`<${Button} onClick=${() => attempt("Could not look further back", () => loadPast(view.id, true))}>Earlier<//>`}
      </details>
    </section>
  `;
}

/** What the server remembers from before the page, then what the page was told. A turn that had begun before the page
 * and is over is asked for. */
function useHappenings(id) {
  const live = happeningsOf(id).value;
  const { entries } = pastOf(id).value;
  const turn = live.find(({ name }) => name === "turn");
  const unseen = !turn || turn.data.status === "begun" ? 0 : turn.number;
  useEffect(() => {
    const leaving = new AbortController();
    loadPast(id, false, leaving.signal).catch(() => {}); // the timeline begins with the page then
    return () => leaving.abort();
  }, [id, unseen]);
  return useMemo(() => [...happeningsBefore(live[0]?.time ?? Infinity, entries), ...live], [live, entries]);
}

const EventTable = ({ rows }) => html`
  <div class="scroll" tabindex="0" role="group" aria-label="What happened, newest first">
    <table>
      <thead><tr><th>Time</th><th>What</th><th>Details</th></tr></thead>
      <tbody>${rows.map(({ time, what, details }) => html`<tr><td class="clock">${moment(time)}</td><td>${what}</td><td class="dim">${details}</td></tr>`)}</tbody>
    </table>
  </div>
`;

const TICKS = 4;

/** `lanes` are those of `lanesOf`; the drawing goes from `start` to `now`, Unix seconds. The table says the same in words. */
function Lanes({ lanes, start, now }) {
  const scale = (time) => (100 * (Math.min(Math.max(time, start), now) - start)) / (now - start);
  const seen = (span) => (span.to ?? now) > start;
  return html`
    <div class="lanes" role="img" aria-label=${`Lanes of place, phase and turn from ${moment(start)} to ${moment(now)}; the table below says the same`}>
      <${Lane} label="Place">${lanes.tier.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
        name=${`tier-${span.value}`} said=${tierText(span)} />`)}<//>
      <${Lane} label="Phase">${lanes.phase.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
        name=${`phase-${span.value}`} said=${span.value} />`)}<//>
      <${Lane} label="Turn">
        ${lanes.turns.filter(seen).map((turn) => html`<${Turn} key=${turn.from} turn=${turn} pauses=${lanes.pauses} scale=${scale} now=${now} />`)}
        ${lanes.pauses.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
          name="state-paused" said=${span.value} />`)}
      <//>
      <${Axis} start=${start} now=${now} />
    </div>
  `;
}

const Lane = ({ label, children }) => html`<div class="lane"><span class="name">${label}</span><div class="track">${children}</div></div>`;

const at = (scale, from, to) => ({ left: `${scale(from)}%`, width: `${Math.max(0, scale(to) - scale(from))}%` });

const Span = ({ span, scale, name, said }) => html`
  <span class=${`span ${name}`} style=${at(scale, span.from, span.to)} title=${`${said}: ${seconds(span.to - span.from)}`}>${said}</span>
`;

/** A turn: its waits in front, then what it generated: if all came at once, that took no time, but tells how the turn ended.
 * That stands behind the last pause, which is drawn over the turn. */
function Turn({ turn, pauses, scale, now }) {
  const to = turn.to ?? now;
  const parts = [];
  let from = turn.from;
  for (const [part, duration] of Object.entries(turn.waits ?? {})) {
    const end = Math.min(from + duration / 1000, to);
    if (end > from) parts.push({ part, from, end, said: `${part} ${milliseconds(duration)}` });
    from = end;
  }
  parts.push({ part: "decode", from: Math.min(from, to), end: to, said: turn.to === null ? "running" : `${turn.reason} after ${seconds(to - turn.from)}` });
  const resumed = Math.max(...pauses.filter((each) => each.from >= turn.from && each.to < to).map((each) => each.to));
  const indent = (from, end) => (resumed > from && resumed < end ? { paddingInlineStart: `calc(5px + ${scale(resumed) - scale(from)}%)` } : {});
  return parts.map(({ part, from, end, said }) => html`<span key=${part} class=${`span ${part}`} style=${{ ...at(scale, from, end), ...indent(from, end) }} title=${said}>${said}</span>`);
}

const tierText = ({ value, kv }) =>
  value === "none" ? "no KV" : `${place({ tier: value })}${kv ? ` ${bytes(bytesThere(kv))}` : ""}`;

function Axis({ start, now }) {
  const times = Array.from({ length: TICKS + 1 }, (_, index) => start + ((now - start) * index) / TICKS);
  return html`<div class="lane axis"><span class="name" /><div class="track">
    ${times.map((time, index) => html`<span key=${index} class="tick" style=${{ left: `${(100 * index) / TICKS}%` }}>${moment(time)}</span>`)}
  </div></div>`;
}

const PARTS = ["queue", "restore", "prefill"];
const SHOWN = 8;

/** `turns` are those of `lanesOf`, `usage` the session's: it knows the last turn, if that was before the page opened. */
function Waits({ turns, usage }) {
  const known = turns.filter((turn) => turn.waits !== null).slice(-SHOWN).reverse();
  if (turns.length === 0 && usage?.last_turn) {
    known.push({ from: null, waits: usage.resume_ms, usage: usage.last_turn });
  }
  const longest = Math.max(1e-9, ...known.map(total));
  return html`
    <div class="waits stack">
      <h3>What turns waited for</h3>
      <ul class="legend">${PARTS.map((part) => html`<li key=${part}><span class=${`swatch ${part}`} aria-hidden="true" />${part}</li>`)}</ul>
      ${known.length === 0 && html`<p class="dim">The next turn's waits appear here: the queue, KV that came back, the prefill.</p>`}
      <ol>${known.map((turn) => html`<${Bar} key=${turn.from} turn=${turn} longest=${longest} />`)}</ol>
    </div>
  `;
}

const total = (turn) => PARTS.reduce((sum, part) => sum + turn.waits[part], 0);

function Bar({ turn, longest }) {
  const { usage } = turn;
  const said = waits(turn.waits);
  return html`
    <li>
      <span class="clock">${turn.from === null ? "before" : moment(turn.from)}</span>
      <span class="bar" role="img" aria-label=${said} title=${said}>
        ${PARTS.map((part) => html`<span key=${part} class=${part} style=${{ width: `${(100 * turn.waits[part]) / longest}%` }} />`)}
      </span>
      <span class="number">${milliseconds(total(turn))}</span>
      <span class="parts dim">${said}${usage && ` · ${counted(usage.completion_tokens, "token")} generated`}</span>
    </li>
  `;
}

/** `{phase, tier, turns, pauses}`. The first two are spans `{from, to, value, kv}`, one after the other; times are Unix
 * seconds, and the last span of each ends `now`. A turn is `{from, to, reason, usage, waits}`: `to` is null while it
 * runs, `waits` is what it waited for, in milliseconds, as soon as it is over. A pause is `{from, to, value}`. */
function lanesOf(happenings, now) {
  const lanes = { phase: [], tier: [], turns: [], pauses: [] };
  for (const happening of happenings) TAKE[happening.name]?.(lanes, happening);
  for (const lane of [lanes.phase, lanes.tier]) if (lane.length) lane.at(-1).to = now;
  end(lanes.pauses, now);
  return lanes;
}

const TAKE = {
  session({ phase, tier, turns, pauses }, happening) {
    const { time, data: { session } } = happening;
    extend(phase, time, session.phase);
    extend(tier, time, session.kv.tier ?? "none", session.kv);
    if (session.state !== "idle") begin(turns, time); // it had begun before anybody looked
    else if (isSeen(happening)) end(turns, time, UNSEEN);
    if (session.state === "paused") begin(pauses, time, "paused");
    else end(pauses, time);
  },
  turn({ turns, pauses }, { time, data }) {
    end(pauses, time);
    if (data.status === "begun") {
      end(turns, time, UNSEEN);
      begin(turns, time);
    } else end(turns, time, { reason: data.finish_reason ?? data.code, usage: data.usage, waits: data.resume_ms });
  },
  pause({ pauses }, { time, data }) {
    end(pauses, time);
    begin(pauses, time, `paused ${spot(data.checkpoint)}`);
  },
  past({ phase, tier, pauses }, { time, data }) {
    if (data.phase) extend(phase, time, data.phase);
    if (data.kind in CAME || data.kind === "moved") extend(tier, time, data.tier ?? "none");
    if (data.kind === "resumed") end(pauses, time);
  },
};

/** The end of a turn was told while the page did not hear. */
const UNSEEN = { reason: "ended unseen" };

function begin(lane, from, value) {
  if (lane.at(-1)?.to !== null) lane.push({ from, to: null, value, usage: null, waits: null });
}

function end(lane, to, how) {
  if (lane.at(-1)?.to === null) Object.assign(lane.at(-1), { to, ...how });
}

const spot = ({ point, layer }) => where(point, [layer]);

function extend(lane, time, value, kv = null) {
  const last = lane.at(-1);
  if (last) last.to = time;
  if (last?.value === value) last.kv = kv;
  else lane.push({ from: time, to: time, value, kv });
}

/** `{time, what, details}`, newest first. */
function rowsOf(happenings) {
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
  edit: (edit) => [["Checkpoint edited", spot(edit)]],
  breakpoints: ({ armed }) => [["Breakpoints changed", `${armed.length} armed`]],
  turn: (turn) => [TURNS[turn.status](turn)],
  pause: ({ checkpoint }) => [[`Paused ${spot(checkpoint)}`, pausedAt(checkpoint)]],
  past: (entry) => PAST[entry.kind]?.(entry) ?? [[CAME[entry.kind], entry.tokens ? counted(entry.tokens, "token") : ""]],
};

/** The server's timeline does not keep the positions. */
const pausedAt = ({ first, end, breakpoint }) => (end ? positions({ first, end }) : "") + (breakpoint ? `, at ${breakpoint}` : "");

const CAME = { opened: "Opened", restored: "The server came back", arrived: "Came from another server" };

/** Entries of the server's own timeline, which knows more and less than the live stream. */
const PAST = {
  begun: () => [],
  resumed: () => [["Resumed", ""]],
  closed: () => [["Closed", ""]],
  departed: () => [["Went to another server", ""]],
  phase: ({ phase, returns_at: at }) => [[`Phase ${phase}`, at ? `back at ${moment(at)}` : ""]],
  moved: ({ tier, tokens }) => [[`KV ${place({ tier })}`, tokens ? counted(tokens, "token") : ""]],
};

const TURNS = {
  begun: () => ["Turn begun", ""],
  finished: ({ finish_reason, usage, late_s: late, recompute_reason: why }) => [
    finish_reason === "shutdown" ? RESTARTED : `Turn finished: ${finish_reason}`,
    `${counted(usage.completion_tokens, "token")} generated, ${number(usage.cached_tokens)} of ` +
      `${number(usage.prompt_tokens)} cached, ${number(usage.tokens_recomputed)} recomputed${why ? ` (${why})` : ""}` +
      (late > 0 ? `, ${seconds(late)} late` : ""),
  ],
  failed: ({ code }) => (code === "server_restarted" ? [RESTARTED, "what it had is lost"] : ["Turn failed", code]),
};
const RESTARTED = "Turn ended: the server restarted";

/** What differs between two views of a session. */
function changes(before, after) {
  if (before === null) return [["First seen", `${turnWord(after)}, phase ${after.phase}, KV ${place(after.kv)}`]];
  const said = [];
  if (before.phase !== after.phase) said.push([`Phase ${after.phase}`, `was ${before.phase}`]);
  if (before.kv.tier !== after.kv.tier) said.push([`KV ${place(after.kv)}`, moved(before, after)]);
  if (before.state !== after.state && after.state === "queued") said.push(["In the queue", ""]);
  if (after.tokens < before.tokens) said.push(["Rewound", `from ${number(before.tokens)} to ${counted(after.tokens, "token")}`]);
  if (before.usage.restores < after.usage.restores) said.push(["Restored", restored(before.usage, after.usage)]);
  return said;
}

/** Bytes of the copy that `tier` means; one on its way still counts where it comes from. */
function bytesThere({ tier, device_bytes, host_bytes, disk_bytes }) {
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
