// The list of named vectors: add one from a file, delete one.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { errorElse, errorOf, Field } from "../shell/controls.js";
import { Failure, Loading, useAction } from "../shell/states.js";
import { attempt } from "../state/notices.js";
import { deleteVector, keepVector, refreshVectors, vectors, vectorsError } from "./vector_list.js";

export function Vectors() {
  const known = vectors.value;
  const error = vectorsError.value;
  return html`
    <section class="panel vectors stack" aria-labelledby="vectors-title">
      <h2 id="vectors-title">Vectors</h2>
      <${Failure} error=${error} retry=${refreshVectors} />
      ${known === null ? !error && html`<${Loading} what="vectors" />` : html`<${List} known=${known} />`}
      <${FromFile} />
    </section>
  `;
}

function List({ known }) {
  if (!known.length) return html`<p class="dim">There are none. Make one from two prompts, or add a file.</p>`;
  return html`<table>
    <thead><tr>
      <th>name</th><th class="number">size</th><th>type</th><th class="number">norm</th>
      <th><span class="hidden">what to do</span></th>
    </tr></thead>
    <tbody>${known.map(({ name, size, dtype, norm }) => html`<tr key=${name}>
      <td class="mono">${name}</td><td class="number">${size}</td><td>${dtype}</td>
      <td class="number">${norm.toFixed(2)}</td>
      <td class="number"><button class="danger" aria-label="Delete ${name}"
        onClick=${() => attempt(`Delete ${name}`, () => deleteVector(name))}>Delete</button></td>
    </tr>`)}</tbody>
  </table>`;
}

function FromFile() {
  const [name, setName] = useState("");
  const { error, act } = useAction();
  const add = async (event) => {
    event.preventDefault();
    const form = event.target;
    const { done } = await act(async () => keepVector(name, await form.elements.file.files[0].arrayBuffer()));
    if (!done) return;
    setName("");
    form.reset();
  };
  return html`<form class="fields" onSubmit=${add}>
    <${Field} id="file-vector-name" label="Name" error=${errorOf(error, "name")} control=${(told) => html`
      <input ...${told} required value=${name} onInput=${(event) => setName(event.target.value)} />`} />
    <${Field} id="file" label="Safetensors file" error=${errorElse(error, ["name"])?.message} control=${(told) => html`
      <input ...${told} type="file" accept=".safetensors" required />`} />
    <button type="submit">Add the file</button>
  </form>`;
}
