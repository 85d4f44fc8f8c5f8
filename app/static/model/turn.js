// The session's turn: where one is written and begun, steps through a paused one, and what it has said.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { Composer } from "../session/composer.js";
import { Button, Failure } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { AFTER } from "../state/points.js";
import { cancel, overOf, resume, whyNoTurn } from "../state/turns.js";
import { deskOf } from "./desk.js";
import { TryIt } from "./example.js";

export function Turn({ desk }) {
  const { running, text, verb } = desk.turn.value;
  const view = desk.session.value;
  const isUnderWay = view.state === "paused" || (running && verb === "resume");
  return html`
    <section class="panel turn stack" aria-labelledby="turn-title">
      <h2 id="turn-title">Turn</h2>
      <${Failure} error=${overOf(view)} />
      ${isUnderWay
        ? html`<${Steps} desk=${desk} />`
        : html`<${Composer} view=${view} title=${null} buttons=${Start} />`}
      <p class="said mono" aria-live="polite">
        ${text || html`<span class="dim">What the turn generates appears here.</span>`}
      </p>
    </section>
  `;
}

function Start({ view, running }) {
  const busy = running || view.state !== "idle" ? "A turn runs. Wait for its end, or cancel it." : null;
  return html`<div class="row">
    <${Button} class="primary" type="submit" why=${busy ?? whyNoTurn.value} title="Ctrl+Enter">Start the turn<//>
    <${Button} why=${busy ? null : "No turn runs."} onClick=${() => attempt("Cancel", () => cancel(view.id))}>Cancel<//>
    ${view.tokens === 0 && html`<${TryIt} desk=${deskOf(view.id)} why=${busy ?? whyNoTurn.value} />`}
  </div>`;
}

/** Buttons that take a paused turn further. */
function Steps({ desk }) {
  const { checkpoint, state } = desk.session.value;
  const { running, error } = desk.turn.value;
  const isAfter = !checkpoint || checkpoint.point === AFTER;
  const layer = (checkpoint?.layer ?? 0) - (isAfter ? 0 : 1); // the last one that the pass is through with
  const last = server.value.num_layers - 1;
  const busy = running || state !== "paused" ? "The turn runs. Wait for its next pause." : whyNoTurn.value;
  const atEnd = checkpoint && layer === last ? "This is the last layer: go on to the next token." : null;
  const step = (until) => () => resume(desk.id, until);
  return html`
    <div class="row" role="group" aria-label="Go on">
      <${Button} class="primary" why=${busy ?? atEnd} onClick=${step({ layer: layer + 1 })}>${isAfter ? "Next layer" : "After this layer"}<//>
      <${ToLayer} layer=${layer} last=${last} why=${busy ?? atEnd} go=${(k) => resume(desk.id, { layer: k })} />
      <${Button} why=${busy} onClick=${step("next_token")} title="The same place, for the next token">Next token<//>
      <${Button} why=${busy} onClick=${step(null)} title="Or the end, if there is none">Next breakpoint<//>
      <${Button} why=${busy} onClick=${step("end")} title="Past every breakpoint that pauses">To the end<//>
      <${Button} class="danger" onClick=${() => attempt("Cancel", () => cancel(desk.id))}>Cancel the turn<//>
    </div>
    <${Failure} error=${error} />
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
