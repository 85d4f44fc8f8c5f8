// Buttons that take a paused turn further.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { Button } from "./button.js";
import { cancel, resume } from "./turns.js";

export function Steps({ desk }) {
  const { checkpoint, state } = desk.session.value;
  const { running, error } = desk.turn.value;
  const layer = checkpoint?.layer ?? 0;
  const last = server.value.num_layers - 1;
  const busy = running || state !== "paused" ? "The turn runs. Wait for its next pause." : null;
  const atEnd = checkpoint && layer === last ? "This is the last layer: go on to the next token." : null;
  const step = (until) => () => resume(desk, until);
  return html`
    <div class="steps" role="group" aria-label="Go on">
      <${Button} class="primary" why=${busy ?? atEnd} onClick=${step({ layer: layer + 1 })}>Next layer<//>
      <${ToLayer} layer=${layer} last=${last} why=${busy ?? atEnd} go=${(k) => resume(desk, { layer: k })} />
      <${Button} why=${busy} onClick=${step("next_token")} title="The same layer, for the next token">Next token<//>
      <${Button} why=${busy} onClick=${step(null)} title="Or the end, if there is none">Next breakpoint<//>
      <${Button} why=${busy} onClick=${step("end")} title="Past every breakpoint that pauses">To the end<//>
      <${Button} class="danger" onClick=${() => attempt("Cancel", () => cancel(desk))}>Cancel the turn<//>
    </div>
    <p class="wrong" role="alert">${error?.message}</p>
  `;
}

function ToLayer({ layer, last, why, go }) {
  const [chosen, choose] = useState(null);
  const layers = Array.from({ length: last - layer }, (_, at) => layer + 1 + at);
  const to = layers.includes(chosen) ? chosen : last;
  return html`<span class="row tight">
    <${Button} why=${why} onClick=${() => go(to)}>To layer<//>
    <select aria-label="Layer to go to" value=${to} onChange=${(event) => choose(Number(event.target.value))}>
      ${layers.length === 0 && html`<option value=${last}>${last}</option>`}
      ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
    </select>
  </span>`;
}
