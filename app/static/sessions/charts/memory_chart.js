// One tier over time: what sessions own, what is cached above that, and the budget.
import { computed } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { bytes } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { memory, samples } from "../../state/memory.js";
import { tierName } from "../looks.js";
import { BINARY, Chart } from "./chart.js";
import { ChartPanel } from "./panel.js";
import { columns, owned, peak, used } from "./series.js";

/** A budget is drawn if it is at most this many times what was used; else the use would be a line at the bottom. */
const NEAR = 3;

export function MemoryChart({ tier, height }) {
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
    <${Chart} data=${data} height=${height} label=${label} format=${bytes} steps=${BINARY} most=${ceiling(tier)} series=${[
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
