// The length of the residual stream by layer at one position, and its cosine to a named vector.
import { useEffect, useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Failure } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { LineChart } from "./line_chart.js";
import { isVector, VectorOptions } from "./vectors.js";

export function Norms({ desk }) {
  const [chosen, setChosen] = useState("");
  const name = isVector(chosen) ? chosen : ""; // it may have been deleted
  const { found, error } = useLook(desk, "norms", { vector: name || null }, desk.preview.value);
  return html`
    <section class="panel norms stack" aria-labelledby="norms-title">
      <h2 id="norms-title">Norm and cosine by layer</h2>
      <div class="row">
        <label>Cosine to <select value=${name} onChange=${(event) => setChosen(event.target.value)}>
          <${VectorOptions} none="no vector" />
        </select></label>
      </div>
      <${Failure} error=${error} />
      <${Charts} name=${name} found=${found} />
    </section>
  `;
}

/** `{found, error, positions}`: the server's answer of `what` at the position that is looked at, anew wherever the turn comes to, and
 * as `changed` does; without a position, at the last that is kept. */
export function useLook(desk, what, asked, changed) {
  const [answer, setAnswer] = useState({ found: null, error: null });
  const position = desk.cell.value?.position;
  const place = desk.place.value;
  const positions = position === undefined ? "last" : `${position}:${position + 1}`;
  const query = { ...asked, positions };
  useEffect(() => {
    if (place === "busy") return undefined;
    const leaving = new AbortController();
    call("GET", `/v1/sessions/${desk.id}/${what}`, { query, signal: leaving.signal })
      .then((found) => setAnswer({ found, error: null }))
      .catch((error) => error.name !== "AbortError" && setAnswer({ found: null, error }));
    return () => leaving.abort();
  }, [desk, JSON.stringify(query), place, changed]);
  return { ...answer, positions };
}

function Charts({ name, found }) {
  if (!found?.layers.length) return html`<p class="dim" role="status">Two charts appear here, from what is captured.</p>`;
  const known = new Map(found.layers.map((each) => [each.layer, each]));
  const at = (layer, field) => known.get(layer)?.[field]?.[0] ?? null;
  const byLayer = (field) => Array.from({ length: server.value.num_layers }, (_, layer) => at(layer, field));
  return html`<div class="sides">
    <div><h3>Norm at position ${found.first}</h3>
      <${LineChart} label="Norm by layer" values=${byLayer("norms")} from=${0} format=${short} />
    </div>
    <div><h3>${name ? `Cosine to ${name}` : "Cosine"}</h3>${name
      ? html`<${LineChart} label="Cosine by layer" values=${byLayer("cosines")} format=${(cosine) => (Math.round(1000 * cosine) / 1000 || 0).toFixed(3)} />`
      : html`<p class="dim">Choose a vector.</p>`}</div>
  </div>`;
}
