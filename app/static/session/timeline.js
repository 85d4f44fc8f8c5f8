// What happened to a session over time: lanes, what its turns waited for, and all of it as a table.
import { useSignal } from "@preact/signals";
import { html } from "../lib/html.js";
import { happeningsOf } from "../state/happenings.js";
import { memory } from "../state/memory.js";
import { rowsOf } from "./events.js";
import { Lanes } from "./lanes.js";
import { lanesOf } from "./spans.js";
import { clock, Waits } from "./waits.js";

/** What can be looked at, in seconds; null is all. */
const RANGES = [["Everything known", null], ["Last 10 minutes", 600], ["Last minute", 60]];
const SHORTEST_S = 5;

export function Timeline({ view }) {
  void memory.value; // once a second: time goes on
  const range = useSignal(null);
  const now = Date.now() / 1000;
  const happenings = happeningsOf(view.id).value;
  const lanes = lanesOf(happenings, now);
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
        <${EventTable} rows=${rowsOf(happenings)} />
      </details>
    </section>
  `;
}

const EventTable = ({ rows }) => html`
  <div class="scroll" tabindex="0" role="group" aria-label="What happened, newest first">
    <table>
      <thead><tr><th>Time</th><th>What</th><th>Details</th></tr></thead>
      <tbody>${rows.map(({ time, what, details }) => html`<tr><td class="clock">${clock(time)}</td><td>${what}</td><td class="dim">${details}</td></tr>`)}</tbody>
    </table>
  </div>
`;
