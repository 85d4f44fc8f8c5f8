// How many turns run, and how many wait for their first step.
import { computed } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { number } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { memory, samples } from "../../state/memory.js";
import { Chart, WHOLE } from "./chart.js";
import { ChartPanel } from "./panel.js";
import { columns, peak } from "./series.js";

const READS = [({ view }) => view.turns_running, ({ view }) => view.turns_waiting];

export function QueueChart({ height }) {
  const data = useMemo(() => computed(() => columns(samples.value, READS)), []);
  const [, running, waiting] = data.value;
  const lines = [
    { token: "--good", name: "running", text: number(memory.value?.turns_running ?? 0), about: "turns that compute" },
    { token: "--warn", name: "waiting", text: number(memory.value?.turns_waiting ?? 0), about: "turns that wait for their first step" },
  ];
  const label = `Turns in the last 10 minutes: now ${lines[0].text} running and ${lines[1].text} waiting, at most
    ${peak(running)} running and ${peak(waiting)} waiting.`;
  return html`<${ChartPanel} title="Queue" unit="turns" lines=${lines}>
    <${Chart} data=${data} height=${height} label=${label} format=${number} steps=${WHOLE} most=${(max) => Math.max(4, Math.ceil(1.15 * max))} series=${[
      { token: "--good", fill: 20, isStepped: true },
      { token: "--warn", isStepped: true },
    ]} />
  <//>`;
}
