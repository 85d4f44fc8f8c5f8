// The length of the residual stream by layer at one position, and its cosine to a named vector.
import { useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { cosine, norm } from "../lib/vectors.js";
import { server } from "../state/connection.js";
import { Button } from "./button.js";
import { residualsAt } from "./residuals.js";
import { LineChart } from "./line_chart.js";
import { numbersOf, vectors } from "./vector_list.js";

export function Norms({ desk }) {
  const [name, setName] = useState("");
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const position = desk.cell.value?.position ?? desk.lens.end.value - 1;
  const measure = async () => {
    setError(null);
    try {
      setFound(await measured(desk.id, position, name));
    } catch (thrown) {
      setError(thrown);
    }
  };
  return html`
    <section class="panel norms stack" aria-labelledby="norms-title">
      <h2 id="norms-title">Norm and cosine by layer</h2>
      <div class="row">
        <label>Cosine to <select value=${name} onChange=${(event) => setName(event.target.value)}>
          <option value="">no vector</option>
          ${(vectors.value ?? []).map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
        </select></label>
        <${Button} why=${position < 0 ? "The session has no tokens yet." : null} onClick=${measure}>
          Measure position ${Math.max(0, position)}<//>
      </div>
      ${error && html`<p class="wrong" role="alert">${error.message}</p>`}
      <${Charts} found=${found} />
    </section>
  `;
}

function Charts({ found }) {
  if (!found) return html`<p class="dim">Two charts appear here, from the layers that are captured.</p>`;
  const { position, name, norms, cosines } = found;
  if (!norms.some((value) => value !== null)) return html`<p role="status">Nothing is captured at position ${position}.</p>`;
  return html`<div class="sides">
    <div><h3>Norm at position ${position}</h3><${LineChart} label="Norm by layer" values=${norms} from=${0} format=${(value) => value.toPrecision(3)} /></div>
    ${name && html`<div><h3>Cosine to ${name}</h3><${LineChart} label="Cosine by layer" values=${cosines} format=${(value) => value.toFixed(3)} /></div>`}
  </div>`;
}

async function measured(id, position, name) {
  const [residuals, vector] = await Promise.all([residualsAt(id, position), name ? numbersOf(name) : null]);
  const byLayer = (measure) => Array.from({ length: server.peek().num_layers }, (_, layer) => (residuals.has(layer) ? measure(residuals.get(layer)) : null));
  return { position, name, norms: byLayer(norm), cosines: vector && byLayer((each) => cosine(each, vector)) };
}
