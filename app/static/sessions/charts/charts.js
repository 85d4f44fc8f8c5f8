// Memory, moves and the queue over the last ten minutes.
import { computed } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { bytes, number } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { memory, samples } from "../../state/memory.js";
import { tierName, TIERS } from "../looks.js";
import { BINARY, Chart, ChartPanel, peak, WHOLE } from "./chart.js";

export const Charts = () => html`<section class="charts" aria-label="The last 10 minutes">
  ${TIERS.map((tier) => html`<${MemoryChart} key=${tier} tier=${tier} />`)}
  <${MovesChart} />
  <${QueueChart} />
</section>`;

/** A budget is drawn if it is at most this many times what was used; else the use would be a line at the bottom. */
const NEAR = 3;

function MemoryChart({ tier }) {
  const data = useMemo(() => computed(() => columns(samples.value, [used(tier), owned(tier), budget(tier)])), []);
  const use = memory.value?.data[tier];
  if (use?.total_bytes === 0) return null;
  const most = peak(data.value[1]);
  const lines = [
    { token: `--${tier}`, name: "owned", text: use ? bytes(use.owned_bytes) : "–", about: "held by sessions" },
    { token: "--dim", name: "budget", text: use ? bytes(use.total_bytes) : "–", about: use && use.total_bytes > NEAR * most ? "above this chart" : "the dashed line" },
  ];
  const label = `${tierName[tier]} memory of the last 10 minutes: now ${bytes(use?.owned_bytes ?? 0)} owned and
    ${bytes(use?.cached_bytes ?? 0)} cached, at most ${bytes(most)} in use, of a budget of ${bytes(use?.total_bytes ?? 0)}.`;
  return html`<${ChartPanel} title=${tierName[tier]} unit="memory" lines=${lines}>
    <${Chart} data=${data} label=${label} format=${bytes} steps=${BINARY} most=${ceiling(tier)} series=${[
      { token: `--${tier}`, fill: 15 },
      { token: `--${tier}`, fill: 35 },
      { token: "--dim", dash: [5, 4] },
    ]} />
  <//>`;
}

const budget = (tier) => ({ view }) => view.data[tier].total_bytes;

/** The top of the axis: a little above the budget, or above the use if that is far below. */
const ceiling = (tier) => () => {
  const most = peak(samples.value.map(used(tier)));
  const total = memory.value?.data[tier].total_bytes ?? 1;
  return total <= NEAR * most ? 1.05 * total : Math.max(1.3 * most, total / 1024);
};

const MIB = 1 << 20;
const WAYS = [
  { way: "out", name: "to host", token: "--host" },
  { way: "in", name: "to device", token: "--device" },
  { way: "to_disk", name: "to disk", token: "--disk" },
  { way: "from_disk", name: "from disk", token: "--good" },
];

function MovesChart() {
  const data = useMemo(() => computed(() => columns(samples.value, WAYS.map(({ way }) => rate(way)))), []);
  const { moves } = memory.value ?? { moves: {} };
  if (memory.value !== null && Object.keys(moves).length === 0) return null;
  const [, ...rates] = data.value;
  const lines = WAYS.map(({ way, name, token }, index) => {
    const limit = moves[way]?.bytes_per_s;
    const about = limit ? `copies run at ${perSecond(limit)}` : "nothing has moved this way yet";
    return { token, name, text: `${inMib(rates[index].at(-1) ?? 0)}${limit ? ` (${inMib(limit)})` : ""}`, about };
  });
  const label = `Moves of KV in the last 10 minutes. ${lines
    .map(({ name, text, about }, index) => `${name}: ${text} MiB/s now, at most ${perSecond(peak(rates[index]))}; ${about}`)
    .join(". ")}.`;
  return html`<${ChartPanel} title="Moves" unit="MiB/s now (of copies)" lines=${lines}>
    <${Chart} data=${data} label=${label} format=${perSecond} steps=${BINARY} most=${(max) => Math.max(1.15 * max, MIB / 16)} series=${WAYS} />
  <//>`;
}

/** In MiB/s, whatever the size: rates are for comparing. */
const perSecond = (count) => `${inMib(count)} MiB/s`;

function inMib(count) {
  const mib = count / MIB;
  if (mib === 0) return "0";
  return mib < 10 ? mib.toFixed(mib < 0.1 ? 2 : 1) : number(Math.round(mib));
}

const READS = [({ view }) => view.turns_running, ({ view }) => view.turns_waiting];

function QueueChart() {
  const data = useMemo(() => computed(() => columns(samples.value, READS)), []);
  const [, running, waiting] = data.value;
  const lines = [
    { token: "--good", name: "running", text: number(memory.value?.turns_running ?? 0), about: "turns that compute" },
    { token: "--warn", name: "waiting", text: number(memory.value?.turns_waiting ?? 0), about: "turns that wait for their first step" },
  ];
  const label = `Turns in the last 10 minutes: now ${lines[0].text} running and ${lines[1].text} waiting, at most
    ${peak(running)} running and ${peak(waiting)} waiting.`;
  return html`<${ChartPanel} title="Queue" unit="turns" lines=${lines}>
    <${Chart} data=${data} label=${label} format=${number} steps=${WHOLE} most=${(max) => Math.max(4, Math.ceil(1.15 * max))} series=${[
      { token: "--good", fill: 20, isStepped: true },
      { token: "--warn", isStepped: true },
    ]} />
  <//>`;
}

/** Samples come each second: when one is so late, nobody heard of those before it. */
const GAP_S = 5;

/** Columns for a chart: the seconds before now, then one list for each function of `reads`. A gap is null. */
function columns(samples, reads) {
  const last = samples.at(-1)?.time ?? 0;
  const [times, ...lists] = [[], ...reads.map(() => [])];
  samples.forEach((sample, index) => {
    const values = reads.map((read) => read(sample, index, samples));
    if (index > 0 && sample.time - samples[index - 1].time > GAP_S) take(sample, reads.map(() => null));
    take(sample, values);
  });
  return [times, ...lists];

  function take({ time }, values) {
    times.push(time - last);
    values.forEach((value, at) => lists[at].push(value));
  }
}

const used = (tier) => ({ view }) => view.data[tier].owned_bytes + view.data[tier].cached_bytes;
const owned = (tier) => ({ view }) => view.data[tier].owned_bytes;

/** Bytes in a second that moved one way since the sample before. Null for the first, and after a restart. */
const rate = (way) => (sample, index, samples) => {
  const before = samples[index - 1];
  const [now, then] = [sample.view.moves[way], before?.view.moves[way]];
  if (!now || !then || now.bytes < then.bytes || sample.time <= before.time) return null;
  return (now.bytes - then.bytes) / (sample.time - before.time);
};
