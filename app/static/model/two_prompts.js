// A form that makes a vector from two prompts.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { norm } from "../lib/vectors.js";
import { server } from "../state/connection.js";
import { say } from "../state/notices.js";
import { Button } from "./button.js";
import { difference } from "./differing.js";
import { errorElse, errorOf, Field } from "./field.js";
import { keepVector } from "./vector_list.js";

export function TwoPrompts({ desk }) {
  const count = server.value.num_layers;
  const layer = String(desk.session.value.checkpoint?.layer ?? count >> 1);
  const [form, setForm] = useState({ first: "", second: "", layer, over: "last" });
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [working, setWorking] = useState(false);
  const set = (event) => setForm({ ...form, [event.target.name]: event.target.value });
  const make = async (event) => {
    event.preventDefault();
    if (working) return;
    setWorking(true);
    setError(null);
    try {
      setFound(await difference({ ...form, layer: Number(form.layer) }));
    } catch (thrown) {
      setError(thrown);
    }
    setWorking(false);
  };
  const prompt = (name, label) => html`<${Field} wide id=${name} label=${label} control=${(told) => html`
    <input ...${told} required value=${form[name]} onInput=${set} autocomplete="off" />`} />`;
  return html`
    <section class="panel two-prompts stack" aria-labelledby="two-title">
      <h2 id="two-title">A vector from two prompts</h2>
      <form class="fields" onSubmit=${make}>
        ${prompt("first", "Prompt")} ${prompt("second", "Minus prompt")}
        <${Field} id="layer" label="After layer" error=${errorOf(error, "layer")} control=${(told) => html`
          <input ...${told} type="number" min="0" max=${count - 1} required value=${form.layer} onInput=${set} />`} />
        <${Field} id="over" label="Taken over" control=${(told) => html`
          <select ...${told} value=${form.over} onChange=${set}>
            <option value="last">the last position</option><option value="mean">the mean of all positions</option>
          </select>`} />
        <button type="submit" aria-disabled=${working ? "true" : null}>Compute the difference</button>
      </form>
      ${errorElse(error, ["layer"]) && html`<p class="wrong" role="alert">${error.message}</p>`}
      <${Keep} found=${found} kept=${() => setFound(null)} />
    </section>
  `;
}

function Keep({ found, kept }) {
  const [name, setName] = useState("");
  const [error, setError] = useState(null);
  const keep = async (event) => {
    event.preventDefault();
    if (!found) return;
    setError(null);
    try {
      await keepVector(name, found);
      say(`The vector ${name} is kept.`);
      setName("");
      kept();
    } catch (thrown) {
      setError(thrown);
    }
  };
  return html`<form class="fields" onSubmit=${keep}>
    <p role="status" class=${found ? null : "dim"}>
      ${found ? `Its norm is ${norm(found).toFixed(3)}.` : "Its norm appears here."}
    </p>
    <${Field} id="vector-name" label="Keep as" error=${error?.message ?? null} control=${(told) => html`
      <input ...${told} required value=${name} onInput=${(event) => setName(event.target.value)} />`} />
    <${Button} type="submit" why=${found ? null : "Compute a difference first."}>Keep the vector<//>
  </form>`;
}
