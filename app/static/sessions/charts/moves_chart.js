// How fast KV moves between the tiers, beside what copies have been measured at.
import { computed } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { number } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { memory, samples } from "../../state/memory.js";
import { BINARY, Chart } from "./chart.js";
import { ChartPanel } from "./panel.js";
import { columns, peak, rate } from "./series.js";

const MIB = 1 << 20;
const WAYS = [
  { way: "out", name: "to host", token: "--host" },
  { way: "in", name: "to device", token: "--device" },
  { way: "to_disk", name: "to disk", token: "--disk" },
  { way: "from_disk", name: "from disk", token: "--good" },
];

export function MovesChart({ height }) {
  const data = useMemo(() => computed(() => columns(samples.value, WAYS.map(({ way }) => rate(way)))), []);
  const { moves } = memory.value ?? { moves: {} };
  if (memory.value !== null && Object.keys(moves).length === 0) return null;
  const [, ...rates] = data.value;
  const lines = WAYS.map(({ way, name, token }, index) => {
    const limit = moves[way]?.bytes_per_s;
    const about = limit ? `copies have run at ${perSecond(limit)}` : "nothing has moved this way yet, so no limit is measured";
    return { token, name, text: `${inMib(rates[index].at(-1) ?? 0)}${limit ? ` of ${inMib(limit)}` : ""}`, about };
  });
  const label = `Moves of KV in the last 10 minutes. ${lines
    .map(({ name, text, about }, index) => `${name}: ${text} MiB/s now, at most ${perSecond(peak(rates[index]))}; ${about}`)
    .join(". ")}.`;
  return html`<${ChartPanel} title="Moves" unit="MiB/s now, of the limit measured" lines=${lines}>
    <${Chart} data=${data} height=${height} label=${label} format=${axisRate} steps=${BINARY} most=${(max) => Math.max(1.15 * max, MIB / 16)} series=${WAYS} />
  <//>`;
}

/** In MiB/s, whatever the size: rates are for comparing. */
const perSecond = (count) => `${inMib(count)} MiB/s`;
const axisRate = (count) => `${inMib(count)} MiB`;

function inMib(count) {
  const mib = count / MIB;
  if (mib === 0) return "0";
  return mib < 10 ? mib.toFixed(mib < 0.1 ? 2 : 1) : number(Math.round(mib));
}
