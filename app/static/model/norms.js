// The length of the residual stream by layer at one position, its cosine to a named vector, and the chart of a value by layer.
import { useEffect, useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { pathOf } from "../lib/paths.js";
import { Failure } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { heed, tell } from "../state/route.js";
import { isVector, VectorOptions } from "./vectors.js";

export function Norms({ desk }) {
  const [chosen, setChosen] = useState("");
  useEffect(() => heed((said) => setChosen(said.get("cosine") ?? "")), []);
  const choose = ({ target }) => {
    setChosen(target.value);
    tell({ cosine: target.value });
  };
  const name = isVector(chosen) ? chosen : ""; // it may have been deleted
  const { found, error, asked } = useLook(desk, "norms", { vector: name || undefined }, desk.preview.value);
  return html`
    <section class="panel norms stack" aria-labelledby="norms-title">
      <h2 id="norms-title">Norm and cosine by layer</h2>
      <div class="row">
        <label>Cosine to <select value=${name} onChange=${choose}>
          <${VectorOptions} none="no vector" />
        </select></label>
        <${CopyAs} of=${{ "the norms": () => [asked] }} />
      </div>
      <${Failure} error=${error} />
      <${Charts} name=${name} found=${found} />
    </section>
  `;
}

/** `{found, error, asked}`: the server's answer of `what` at the position that is looked at, anew wherever the turn comes to, and
 * as `changed` does; without a position, at the last that is kept. `asked` is the call. */
export function useLook(desk, what, query, changed) {
  const [answer, setAnswer] = useState({ found: null, error: null });
  const position = desk.cell.value?.position;
  const place = desk.place.value;
  const positions = position === undefined ? "last" : `${position}:${position + 1}`;
  const asked = ["GET", `/v1/sessions/${desk.id}/${what}`, { query: { ...query, positions } }];
  useEffect(() => {
    if (place === "busy") return undefined;
    const leaving = new AbortController();
    call(...asked.slice(0, 2), { ...asked[2], signal: leaving.signal })
      .then((found) => setAnswer({ found, error: null }))
      .catch((error) => error.name !== "AbortError" && setAnswer({ found: null, error }));
    return () => leaving.abort();
  }, [desk, JSON.stringify(asked), place, changed]);
  return { ...answer, asked };
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

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [320, 130, 46, 20, 8];

/** A small chart. `values` has a number, or null, for each layer; the axis begins at `from`, or at the lowest value. */
export function LineChart({ label, values, from = null, format }) {
  const known = values.flatMap((value, layer) => (value === null ? [] : [{ layer, value }]));
  if (!known.length) return html`<p class="dim">There are no values.</p>`;
  const low = from ?? Math.min(...known.map((each) => each.value));
  const high = Math.max(...known.map((each) => each.value), low + 1e-9);
  const x = (layer) => LEFT + (layer / Math.max(1, values.length - 1)) * (WIDTH - LEFT - 8);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const highest = known.reduce((best, each) => (best.value >= each.value ? best : each));
  const said = `${label}. Highest: ${format(highest.value)} after layer ${highest.layer}.`;
  return html`
    <svg class="chart" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label=${said}>
      ${[low, high].map((value) => html`<line class="rule" x1=${LEFT} x2=${WIDTH} y1=${y(value)} y2=${y(value)} />
        <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${format(value)}</text>`)}
      ${ticks(values.length).map(
        (layer) => html`<text x=${x(layer)} y=${HEIGHT - 4} text-anchor="middle">${layer}</text>`,
      )}
      <path class="line" d=${pathOf(values, x, y)} />
      ${known.map(({ layer, value }) => html`<circle class="dot" cx=${x(layer)} cy=${y(value)} r="2.5">
        <title>layer ${layer}: ${format(value)}</title></circle>`)}
    </svg>
  `;
}

const ticks = (count) => [...new Set([0, Math.round((count - 1) / 3), Math.round((2 * (count - 1)) / 3), count - 1])];
