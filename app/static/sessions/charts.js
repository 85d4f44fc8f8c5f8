// What the server did and held over time: as it remembers it, then as the page hears it. All charts have one range.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { moment, serverTime } from "../lib/clock.js";
import { bytes, counted, milliseconds, number, short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { pathOf } from "../lib/paths.js";
import { connection } from "../state/connection.js";
import { memory, samples } from "../state/memory.js";
import { perKey } from "../state/per_key.js";
import { tierName, TIERS } from "./looks.js";

const [MINUTE, HOUR, DAY] = [60, 3600, 86_400];
/** What can be looked at: the last `span` seconds, in values over `step` seconds each, with a tick each `tick`, told in `size`. */
const RANGES = [
  { name: "Last 10 minutes", span: 10 * MINUTE, step: MINUTE, tick: 5 * MINUTE, size: MINUTE, word: "min" },
  { name: "Last hour", span: HOUR, step: MINUTE, tick: 15 * MINUTE, size: MINUTE, word: "min" },
  { name: "Last day", span: DAY, step: 10 * MINUTE, tick: 6 * HOUR, size: HOUR, word: "h" },
  { name: "Last 30 days", span: 30 * DAY, step: HOUR, tick: 10 * DAY, size: DAY, word: "d" },
];
const range = signal(RANGES[1]);
/** What the server remembers of the `span` seconds up to a Unix time: the `minutes` of its answer, each over `step` seconds, and its `marks`. */
const past = perKey({ span: 0, until: 0, step: MINUTE, minutes: [], marks: [] });

async function loadPast({ span, step }, leaving) {
  const until = serverTime();
  const query = { since: until - span, step_s: step };
  const { minutes, marks } = await call("GET", "/v1/activity", { query, signal: leaving });
  past.value = { span, until, step, minutes, marks };
}

const MARKS = {
  started: "The server started", stopped: "The server stopped", killed: "The server was killed, or crashed", deployed: "Deployed",
  draining: "Drain begun", drained: "Drain ended", engine_restarted: "The engine restarted",
};
const marked = ({ kind, at, replica, version, model }) =>
  `${MARKS[kind]}${replica ? ` at ${replica}` : ""}, ${moment(at)}${kind === "deployed" ? `: Djinn ${version}, ${model}` : ""}`;

export function Charts() {
  const { state } = connection.value;
  useEffect(() => {
    if (state !== "live") return undefined;
    const leaving = new AbortController();
    const load = () => loadPast(range.value, leaving.signal).catch(() => {}); // the next one may succeed
    load();
    const timer = setInterval(load, 1000 * Math.max(MINUTE, range.value.step / 6));
    return () => (clearInterval(timer), leaving.abort());
  }, [range.value, state]);
  const { marks } = past.value;
  return html`<section class="stack" aria-labelledby="activity">
    <div class="row">
      <h2 id="activity">Activity</h2>
      <select aria-label="Time of the charts" value=${range.value.name} onChange=${({ target }) => (range.value = RANGES[target.selectedIndex])}>
        ${RANGES.map(({ name }) => html`<option key=${name}>${name}</option>`)}
      </select>
      ${marks.length > 0 && html`<span class="dim">${counted(marks.length, "dashed mark")}, the last one: ${marked(marks.at(-1))}</span>`}
    </div>
    <div class="charts">
      <${Agents} /><${Tokens} /><${Waits} />
      ${TIERS.map((tier) => html`<${MemoryChart} key=${tier} tier=${tier} />`)}
      <${Moves} /><${Queue} />
    </div>
  </section>`;
}

/** Samples come each second: when one is so late, nobody heard of those before it. */
const GAP_S = 5;

/** Columns for a chart: the seconds before now, then one list for each of `reads`: `[of a minute and its seconds, of a
 * sample and the one before]`. While the page does not hear, that is null. */
function columnsOf(...reads) {
  const { until, step, minutes } = past.value;
  const { span } = range.value;
  const heard = span <= HOUR && reads[0][1] ? samples.value : [];
  const now = heard.at(-1)?.time ?? until;
  const known = minutes.filter(({ at }) => at > now - span - step && at < (heard[0]?.time ?? Infinity));
  const rows = [
    ...known.map((each) => ({ at: each.at, lasts: step, values: reads.map(([read]) => read(each, step)), then: 0 })),
    ...heard.map((each, at) => ({ at: each.time, lasts: GAP_S, values: reads.map(([, read]) => read(each, heard[at - 1])), then: null })),
  ];
  const columns = [[], ...reads.map(() => [])];
  const take = (time, values) => [Math.max(-span, time - now), ...values].forEach((value, at) => columns[at].push(value));
  rows.forEach(({ at, lasts, values, then }, index) => {
    const next = rows[index + 1]?.at ?? now;
    take(at, values);
    if (next > at + lasts) take(at + lasts, values.map(() => then));
    if (index === rows.length - 1) take(now, next > at + lasts ? values.map(() => then) : values);
  });
  return columns;
}

/** The largest of some lists of numbers; 0 if there is none. */
const peak = (...lists) => Math.max(0, ...lists.map((list) => list.reduce((most, each) => Math.max(most, each ?? 0), 0)));
/** The sum over the minutes; "…" while those of another time are known. */
const total = (read, format = number) => (past.value.span === range.value.span ? format(past.value.minutes.reduce((sum, each) => sum + read(each), 0)) : "…");
const atLeast = (least) => (max) => Math.max(least, 1.15 * max);

function Agents() {
  const data = columnsOf([({ agents }) => agents]);
  const lines = [{ token: "--accent", name: "at most", text: number(peak(data[1])), about: "had turns in the same minute" }];
  return html`<${Panel} title="Agents" unit="with turns" lines=${lines} data=${data} format=${number} steps=${WHOLE} most=${atLeast(2)} series=${[{ token: "--accent", fill: 25 }]} />`;
}

const computed = (each) => each.prompt_tokens - each.cached_tokens + each.completion_tokens;

function Tokens() {
  const lines = [
    { token: "--good", name: "computed", text: total(computed), about: `in ${total(({ turns }) => turns, (count) => counted(count, "turn"))}` },
    { token: "--dim", name: "cached", text: total((each) => each.cached_tokens), about: "not drawn" },
  ];
  return html`<${Panel} title="Tokens" unit="computed" lines=${lines} data=${columnsOf([computed])} format=${short} steps=${WHOLE} most=${atLeast(10)} series=${[{ token: "--good", fill: 25 }]} />`;
}

function Waits() {
  const data = columnsOf([({ worst_ms }) => worst_ms]);
  const lines = [
    { token: "--warn", name: "longest", text: milliseconds(peak(data[1])), about: "of an agent, for a first token" },
    { token: "--dim", name: "late restores", text: total((each) => each.late_restores), about: "turns that waited for KV" },
    { token: "--dim", name: "late agents", text: total(({ late }) => late), about: "later than they had signalled" },
  ];
  return html`<${Panel} title="Waits" unit="the longest" lines=${lines} data=${data} format=${milliseconds} steps=${WHOLE} most=${atLeast(10)} series=${[{ token: "--warn", fill: 25 }]} />`;
}

/** A budget is drawn if it is at most this many times what was used; else the use would be a line at the bottom. */
const NEAR = 3;

function MemoryChart({ tier }) {
  const use = memory.value?.data[tier] ?? { owned_bytes: 0, total_bytes: 1 };
  const { owned_bytes: owned, total_bytes: budget } = use;
  if (budget === 0) return null;
  const held = (each) => each[`${tier}_bytes`];
  const read = (of) => ({ view }) => of(view.data[tier]);
  const data = columnsOf([held, read((each) => each.owned_bytes + each.cached_bytes)], [held, read((each) => each.owned_bytes)]);
  data.push(data[0].map(() => budget));
  const most = peak(data[1]);
  const isNear = budget <= NEAR * most;
  const lines = [
    { token: `--${tier}`, name: "owned", text: bytes(owned), about: `held by sessions; at most ${bytes(most)} in use` },
    { token: "--dim", name: "budget", text: bytes(budget), about: isNear ? "the dashed line" : "above this chart" },
  ];
  const series = [{ token: `--${tier}`, fill: 15 }, { token: `--${tier}`, fill: 35 }, { token: "--dim", dash: [5, 4] }];
  return html`<${Panel} title=${tierName[tier]} unit="memory" lines=${lines} data=${data} format=${bytes} steps=${BINARY} series=${series}
    most=${() => (isNear ? 1.05 * budget : Math.max(1.3 * most, budget / 1024))} />`;
}

const MIB = 1 << 20;
const WAYS = [
  { way: "out", name: "to host", token: "--host" },
  { way: "in", name: "to device", token: "--device" },
  { way: "to_disk", name: "to disk", token: "--disk" },
  { way: "from_disk", name: "from disk", token: "--good" },
];

function Moves() {
  const { moves } = memory.value ?? { moves: {} };
  if (memory.value !== null && Object.keys(moves).length === 0) return null;
  const data = columnsOf(...WAYS.map(({ way }) => [(each, step) => each[`bytes_${way}`] / step, rate(way)]));
  const lines = WAYS.map(({ way, name, token }, at) => {
    const limit = moves[way]?.bytes_per_s;
    const text = `${inMib(data[at + 1].at(-1) ?? 0)}${limit ? ` (${inMib(limit)})` : ""}`;
    return { token, name, text, about: limit ? `at most ${perSecond(peak(data[at + 1]))}; copies run at ${perSecond(limit)}` : "nothing has moved this way yet" };
  });
  return html`<${Panel} title="Moves" unit="MiB/s now (of copies)" lines=${lines} data=${data} format=${perSecond} steps=${BINARY} most=${atLeast(MIB / 16)} series=${WAYS} />`;
}

/** Bytes in a second that moved one way since the sample before. Null for the first, and after a restart. */
const rate = (way) => ({ time, view }, before) => {
  const [now, then] = [view.moves[way], before?.view.moves[way]];
  if (!now || !then || now.bytes < then.bytes || time <= before.time) return null;
  return (now.bytes - then.bytes) / (time - before.time);
};

/** In MiB/s, whatever the size: rates are for comparing. */
const perSecond = (count) => `${inMib(count)} MiB/s`;

function inMib(count) {
  const mib = count / MIB;
  if (mib === 0) return "0";
  return mib < 10 ? mib.toFixed(mib < 0.1 ? 2 : 1) : number(Math.round(mib));
}

function Queue() {
  const data = columnsOf(...["turns_running", "turns_waiting"].map((name) => [(each) => each[name], ({ view }) => view[name]]));
  const [running, waiting] = [memory.value?.turns_running ?? 0, memory.value?.turns_waiting ?? 0].map(number);
  const lines = [
    { token: "--good", name: "running", text: running, about: `at most ${peak(data[1])}` },
    { token: "--warn", name: "waiting", text: waiting, about: `for their first step, at most ${peak(data[2])}` },
  ];
  const series = [{ token: "--good", fill: 20 }, { token: "--warn" }];
  return html`<${Panel} title="Queue" unit="turns" lines=${lines} data=${data} format=${number} steps=${WHOLE} most=${(max) => Math.max(4, Math.ceil(1.15 * max))} series=${series} />`;
}

/** One chart with its title. `lines` are `{token, name, text, about}`: the colour of each line, and what it stands at. */
function Panel({ title, unit, lines, ...chart }) {
  const label = `${range.value.name}, ${title}: ${lines.map(({ name, text, about }) => `${text} ${name}, ${about}`).join("; ")}`;
  return html`<figure class="chart-panel">
    <figcaption>
      <h3>${title} <span class="dim">${unit}</span></h3>
      <span class="lines">${lines.map(({ token, name, text, about }) => html`<span key=${name} title=${about}><i class="line" style=${{ background: `var(${token})` }}></i>${name} <b>${text}</b></span>`)}</span>
    </figcaption>
    <${Chart} label=${label} ...${chart} />
  </figure>`;
}

const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [74, 14, 6, 24, 88];
/** Pixels between two rules, at least. */
const SPACE = 17;
/** Steps of an axis of bytes, and of one of whole numbers. */
const BINARY = Array.from({ length: 50 }, (_each, power) => 2 ** power);
const WHOLE = Array.from({ length: 9 }, (_each, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

/** `data` are columns: the seconds before now, then a list for each of `series`, `{token, fill, dash}`. `format` makes a
 * number of the y axis a text, in one of these `steps`; `most` is a function of the largest value that the axis must
 * show. It follows the width of its place. */
function Chart({ data, series, format, steps, most, label }) {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([{ contentRect }]) => setWidth(contentRect.width));
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  const { span, tick, size, word } = range.value;
  const { until, marks } = past.value;
  const [times, ...columns] = data;
  const high = most(peak(...columns));
  const ground = HEIGHT - BOTTOM;
  const x = (second) => LEFT + (1 + second / span) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - value / high) * (ground - TOP);
  const step = steps.find((each) => (each / high) * (ground - TOP) >= SPACE) ?? high;
  const rules = Array.from({ length: Math.floor(high / step) + 1 }, (_each, at) => at * step);
  const ticks = Array.from({ length: span / tick + 1 }, (_each, at) => -at * tick);
  return html`<div ref=${place} style=${{ height: `${HEIGHT}px` }}>
    ${width > 0 && html`<svg class="chart" width=${width} height=${HEIGHT} role="img" aria-label=${label}>
      ${rules.map((value) => html`<path class="rule" d="M${LEFT} ${y(value)}H${width - RIGHT}" />
        <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${format(value)}</text>`)}
      ${ticks.map((second) => html`<path class="rule" d="M${x(second)} ${TOP}V${ground}" />
        <text x=${x(second)} y=${HEIGHT - 6} text-anchor="middle">${second ? `${second / size} ${word}` : "now"}</text>`)}
      ${series.map((line, at) => drawn(line, pathOf(columns[at], (index) => x(times[index]), y, true), ground))}
      ${marks.filter(({ at }) => at > until - span).map((mark) => html`<path class="mark ${mark.kind}" d="M${x(mark.at - until)} ${TOP}V${ground}"><title>${marked(mark)}</title></path>`)}
    </svg>`}
  </div>`;
}

/** One line, and the area under it. */
const drawn = ({ token, fill, dash }, path, ground) => html`
  ${fill && path && html`<path d=${areaOf(path, ground)} style=${{ fill: `var(${token})`, fillOpacity: fill / 100 }} />`}
  <path class="line" d=${path} stroke-dasharray=${dash} style=${{ stroke: `var(${token})` }} />
`;

/** Each part of a path that has gaps, down to the ground. */
const areaOf = (path, ground) =>
  path.split(/(?=M)/).map((part) => `${part}V${ground}H${part.slice(1, part.indexOf(" "))}Z`).join("");
