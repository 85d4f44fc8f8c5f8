// A vector from two prompts: the difference of what the model has of them after a layer.
import { call, download, need } from "../lib/api.js";
import { html } from "../lib/html.js";
import { read } from "../lib/safetensors.js";
import { Button, errorElse, errorOf, Failure, Field, useAction } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { numberOf } from "./edits.js";
import { keepVector, NameField } from "./vectors.js";

export function TwoPrompts({ desk }) {
  const count = server.value.num_layers;
  const kept = desk.twoPrompts;
  const form = { ...kept.value, layer: kept.value.layer ?? String(desk.session.value.checkpoint?.layer ?? count >> 1) };
  const put = (changed) => (kept.value = { ...kept.peek(), ...changed });
  const { busy, error, act } = useAction();
  const set = (event) => put({ [event.target.name]: event.target.value });
  const make = (event) => {
    event.preventDefault();
    act(async () => put({ found: await difference(form) }));
  };
  const prompt = (name, label) => html`<${Field} wide id=${name} label=${label} error=${errorOf(error, name)} control=${(told) => html`
    <input ...${told} value=${form[name]} onInput=${set} autocomplete="off" />`} />`;
  return html`
    <section class="panel two-prompts stack" aria-labelledby="two-title">
      <h2 id="two-title">A vector from two prompts</h2>
      <form class="fields" noValidate onSubmit=${make}>
        ${prompt("plus", "Prompt")} ${prompt("minus", "Minus prompt")}
        <${Field} id="layer" label="After layer" error=${errorOf(error, "layer")} control=${(told) => html`
          <input ...${told} type="number" min="0" max=${count - 1} value=${form.layer} onInput=${set} />`} />
        <${Field} id="over" label="Taken over" control=${(told) => html`
          <select ...${told} value=${form.over} onChange=${set}>
            <option value="last">the last position</option><option value="mean">the mean of all positions</option>
          </select>`} />
        <${Button} type="submit" why=${busy ? "It is being computed." : null}>Compute the difference<//>
      </form>
      <${Failure} error=${errorElse(error, ["plus", "minus", "layer"])} />
      <${Keep} name=${form.name} found=${form.found} put=${put} />
    </section>
  `;
}

function Keep({ name, found, put }) {
  const { busy, error, act } = useAction();
  const why = found ? busy && "It is being kept." : "Compute a difference first.";
  const keep = async (event) => {
    event.preventDefault();
    if (!found || !(await act(() => keepVector(name, found))).done) return;
    put({ name: "", found: null });
  };
  return html`<form class="fields" noValidate onSubmit=${keep}>
    <p role="status" class=${found ? null : "dim"}>
      ${found ? `Its norm is ${norm(found).toFixed(3)}.` : "Its norm appears here."}
    </p>
    <${NameField} id="vector-name" label="Keep as" error=${errorOf(error, "vector-name")} value=${name}
      set=${(changed) => put({ name: changed })} />
    <${Button} type="submit" why=${why}>Keep the vector<//>
    <${Failure} error=${errorElse(error, ["vector-name"])} />
  </form>`;
}

/** A Float32Array: what `plus` has after `layer`, minus what `minus` has. `over` is "last" for the prompts' last
 * positions, "mean" for the means over all of them. The session that computes it is closed again. */
async function difference({ plus, minus, layer: text, over }) {
  for (const [param, prompt] of Object.entries({ plus, minus })) need(prompt, { param, message: "enter a prompt" });
  const layer = numberOf(text, { param: "layer", message: "enter a layer" });
  const { id } = await call("POST", "/v1/sessions", { body: SCRATCH });
  try {
    await call("POST", `/v1/sessions/${id}/breakpoints`, { body: { layer, action: "capture" } });
    const a = await residual(id, plus, over);
    const b = await residual(id, minus, over);
    return without(a, b);
  } finally {
    await call("DELETE", `/v1/sessions/${id}`).catch(() => {});
  }
}

/** Of one prompt in an empty session, which is empty again afterwards. A long prompt is captured in parts. */
async function residual(id, prompt, over) {
  await call("POST", `/v1/sessions/${id}/generate`, { body: { prompt, max_tokens: 0 } });
  const parts = read(await download(`/v1/sessions/${id}/captures`));
  await call("DELETE", `/v1/sessions/${id}/captures`);
  await call("POST", `/v1/sessions/${id}/rewind`, { body: { to_token: 0 } });
  const rows = parts.flatMap(rowsOf);
  return over === "last" ? rows.at(-1) : mean(rows);
}

/** The session closes by itself where the page cannot close it any more. */
const SCRATCH = { ttl_s: 600, metadata: { purpose: "a vector from two prompts" } };

const norm = (a) => Math.sqrt(a.reduce((sum, value) => sum + value * value, 0));
const without = (a, b) => Float32Array.from(a, (value, at) => value - b[at]);

const rowsOf = ({ shape: [count, size], values }) =>
  Array.from({ length: count }, (_, at) => values.subarray(at * size, (at + 1) * size));

function mean(vectors) {
  const sum = new Float64Array(vectors[0].length);
  for (const vector of vectors) vector.forEach((value, at) => (sum[at] += value));
  return Float32Array.from(sum, (value) => value / vectors.length);
}
