// The session's turn: a form to begin one, steps through a paused one, and what it has said.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { Button, errorElse, errorOf, Field } from "../shell/controls.js";
import { Failure } from "../shell/states.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { cancel, generate, resume } from "../state/turns.js";

export function Turn({ desk }) {
  const { running, text, verb } = desk.turn.value;
  const isUnderWay = desk.session.value.state === "paused" || (running && verb === "resume");
  return html`
    <section class="panel turn" aria-labelledby="turn-title">
      <h2 id="turn-title">Turn</h2>
      ${isUnderWay ? html`<${Steps} desk=${desk} />` : html`<${Composer} desk=${desk} />`}
      <p class="said mono" aria-live="polite">
        ${text || html`<span class="dim">What the turn generates appears here.</span>`}
      </p>
    </section>
  `;
}

const PARAMS = ["prompt", "max_tokens", "temperature", "seed"];

function Composer({ desk }) {
  const [form, setForm] = useState({ prompt: "", max_tokens: "16", temperature: "0", seed: "0" });
  const idle = desk.session.value.state === "idle";
  const { error } = desk.turn.value;
  const set = (event) => setForm({ ...form, [event.target.name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    if (idle) generate(desk.id, bodyOf(form));
  };
  const number = (name, label) => html`<${Field} id=${name} label=${label} error=${errorOf(error, name)}
    control=${(told) => html`<input ...${told} type="number" step="any" value=${form[name]} onInput=${set} />`} />`;
  return html`
    <form class="composer" onSubmit=${submit} noValidate>
      <${Field} id="prompt" label="Prompt, added to the history" error=${errorOf(error, "prompt")}
        control=${(told) => html`
          <textarea ...${told} rows="2" value=${form.prompt} onInput=${set} onKeyDown=${sendOnEnter} />`} />
      <div class="row">
        ${number("max_tokens", "Most tokens")} ${number("temperature", "Temperature")} ${number("seed", "Seed")}
        <${Button} class="primary" type="submit" why=${idle ? null : RUNS}>Start the turn<//>
        <${Button} why=${idle ? "No turn runs." : null} onClick=${() => attempt("Cancel", () => cancel(desk.id))}>
          Cancel
        <//>
      </div>
      <${Failure} error=${errorElse(error, PARAMS)} />
    </form>
  `;
}

const RUNS = "A turn runs. Wait for its end, or cancel it.";

/** Control and Enter send, as in most composers. */
function sendOnEnter(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
}

/** Without a prompt, the turn goes on from the history as it is. What is no number is left for the server to refuse. */
function bodyOf({ prompt, max_tokens, temperature, seed }) {
  const input = prompt === "" ? { token_ids: [] } : { prompt };
  return { ...input, max_tokens: numberOf(max_tokens), temperature: numberOf(temperature), seed: numberOf(seed) };
}

const numberOf = (text) => (text.trim() === "" ? undefined : Number(text));

/** Buttons that take a paused turn further. */
function Steps({ desk }) {
  const { checkpoint, state } = desk.session.value;
  const { running, error } = desk.turn.value;
  const layer = checkpoint?.layer ?? 0;
  const last = server.value.num_layers - 1;
  const busy = running || state !== "paused" ? "The turn runs. Wait for its next pause." : null;
  const atEnd = checkpoint && layer === last ? "This is the last layer: go on to the next token." : null;
  const step = (until) => () => resume(desk.id, until);
  return html`
    <div class="steps" role="group" aria-label="Go on">
      <${Button} class="primary" why=${busy ?? atEnd} onClick=${step({ layer: layer + 1 })}>Next layer<//>
      <${ToLayer} layer=${layer} last=${last} why=${busy ?? atEnd} go=${(k) => resume(desk.id, { layer: k })} />
      <${Button} why=${busy} onClick=${step("next_token")} title="The same layer, for the next token">Next token<//>
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
