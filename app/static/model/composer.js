// A form that begins a turn.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { attempt } from "../state/notices.js";
import { Button } from "./button.js";
import { errorElse, errorOf, Field } from "./field.js";
import { cancel, start } from "./turns.js";

const PARAMS = ["prompt", "max_tokens", "temperature", "seed"];

export function Composer({ desk }) {
  const [form, setForm] = useState({ prompt: "", max_tokens: "16", temperature: "0", seed: "0" });
  const idle = desk.session.value.state === "idle";
  const { error } = desk.turn.value;
  const set = (event) => setForm({ ...form, [event.target.name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    if (idle) start(desk, bodyOf(form));
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
        <${Button} why=${idle ? "No turn runs." : null} onClick=${() => attempt("Cancel", () => cancel(desk))}>
          Cancel
        <//>
      </div>
      ${errorElse(error, PARAMS) && html`<p class="wrong" role="alert">${error.message}</p>`}
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
