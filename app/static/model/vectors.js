// The caller's named vectors: the list of them, one from a file, one less.
import { useState } from "preact/hooks";
import { call, need, upload } from "../lib/api.js";
import { html } from "../lib/html.js";
import { writeVector } from "../lib/safetensors.js";
import { Button, errorElse, errorOf, Failure, Field, Folded, Loading, useAction } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { attempt, say } from "../state/notices.js";
import { perKey } from "../state/per_key.js";

/** `{found, error}`: `found` has `{name, size, dtype, norm}`, by name, or null before the first answer; `error` is why
 * the last try to read them failed, or null. */
const vectors = perKey({ found: null, error: null });

export async function refreshVectors() {
  try {
    vectors.value = { found: (await call("GET", "/v1/vectors")).data, error: null };
  } catch (error) {
    vectors.value = { ...vectors.peek(), error };
  }
}

/** Keep a vector under a name, and say so: a Float32Array, or the bytes of a safetensors file. */
export async function keepVector(name, content) {
  await refreshVectors();
  const taken = isVector(name);
  await upload("POST", "/v1/vectors", content instanceof Float32Array ? writeVector(content) : content, { name });
  say(taken ? `The vector ${name} replaces the one of that name.` : `The vector ${name} is kept.`);
  await refreshVectors();
}

async function deleteVector(name) {
  await call("DELETE", `/v1/vectors/${encodeURIComponent(name)}`).finally(refreshVectors);
}

/** The choices of a list of vectors; `none` is the text of the one that chooses none. */
export const VectorOptions = ({ none }) => html`<option value="">${none}</option>
  ${(vectors.value.found ?? []).map(({ name }) => html`<option value=${name}>${name}</option>`)}`;

export const isVector = (name) => Boolean(vectors.value.found?.some((each) => each.name === name));

/** Where a new vector gets its name. */
export const NameField = ({ id, label, error, value, set }) => html`<${Field} id=${id} label=${label} error=${error}
  control=${(told) => html`<input ...${told} value=${value} onInput=${(event) => set(event.target.value)} />`}>
  ${isVector(value) && html`<p class="dim" role="status">This replaces the vector of that name.</p>`}
<//>`;

export function Vectors() {
  const { found, error } = vectors.value;
  return html`
    <section class="panel vectors stack" aria-labelledby="vectors-title">
      <h2 id="vectors-title">Vectors</h2>
      <${Failure} error=${error} retry=${refreshVectors} />
      ${found === null ? !error && html`<${Loading} what="vectors" />` : html`<${List} found=${found} />`}
      <${Folded} title="Add a file"><${FromFile} /><//>
    </section>
  `;
}

function List({ found }) {
  if (!found.length) return html`<p class="dim">There are none. “Steering” makes one from two prompts; or add a file.</p>`;
  return html`<table>
    <thead><tr>
      <th>name</th><th class="number">size</th><th>type</th><th class="number">norm</th>
      <th><span class="hidden">what to do</span></th>
    </tr></thead>
    <tbody>${found.map(({ name, size, dtype, norm }) => html`<tr key=${name}>
      <td class="mono">${name}</td><td class="number">${size}</td><td>${dtype}</td>
      <td class="number">${norm.toFixed(2)}</td>
      <td class="number"><button class="danger" aria-label="Delete ${name}"
        onClick=${() => attempt(`Delete ${name}`, () => deleteVector(name))}>Delete</button></td>
    </tr>`)}</tbody>
  </table>`;
}

function FromFile() {
  const [name, setName] = useState("");
  const { busy, error, act } = useAction();
  const add = async (event) => {
    event.preventDefault();
    const form = event.target;
    const { done } = await act(async () => {
      const [file] = form.elements.file.files;
      need(file, { param: "file", message: "choose a file" });
      await keepVector(name, await file.arrayBuffer());
    });
    if (!done) return;
    setName("");
    form.reset();
  };
  return html`<form class="fields" noValidate onSubmit=${add}>
    <${NameField} id="file-vector-name" label="Name" error=${errorOf(error, "file-vector-name")} value=${name} set=${setName} />
    <${Field} id="file" label="Safetensors file" error=${errorOf(error, "file") ?? errorElse(error, ["file-vector-name", "file"])?.message} control=${(told) => html`
      <input ...${told} type="file" accept=".safetensors" />`} />
    <${Button} type="submit" why=${busy && "It is being added."}>Add the file<//>
    <${CopyAs} of=${{ "a vector from a file": () => [["POST", "/v1/vectors", { query: { name: name || "mine" }, file: "vector.safetensors" }]] }} />
  </form>`;
}
