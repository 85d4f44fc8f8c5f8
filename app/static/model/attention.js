// Where the heads of a layer look: a small heatmap for each, of queries by keys.
import { useEffect, useRef, useState } from "preact/hooks";
import { download } from "../lib/api.js";
import { percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { read } from "../lib/safetensors.js";
import { Button, Failure, useAction } from "../shell/controls.js";
import { points } from "../state/points.js";
import { disarm, watchPattern } from "./arming.js";

/** Positions that are drawn: the last ones, so that a cell can be seen. */
const MOST = 256;

export function Attention({ desk }) {
  const { busy, error, act } = useAction();
  const layers = points.value.filter(({ name }) => name === "pattern").flatMap((each) => each.layers);
  const [chosen, choose] = useState(null);
  const [heads, setHeads] = useState([]);
  if (layers.length === 0) return null;
  const layer = chosen ?? layers[layers.length >> 1];
  const watching = (desk.breakpoints.value ?? []).filter((each) => each.point === "pattern" && each.layers.includes(layer));
  const watch = () => act(() => (watching.length ? disarm(desk, watching) : watchPattern(desk, layer)));
  const wait = busy ? "One moment" : null;
  return html`
    <section class="panel attention stack" aria-labelledby="attention-title">
      <h2 id="attention-title">Where heads look</h2>
      <div class="row">
        <label>Layer <select value=${layer} onChange=${(event) => choose(Number(event.target.value))}>
          ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>
        <label><input type="checkbox" checked=${watching.length > 0} disabled=${busy} onChange=${watch} />
          Watch the heads of this layer</label>
        <${Button} why=${wait} onClick=${() => act(async () => setHeads(await readHeads(desk.id, layer)))}>Show them<//>
      </div>
      <${Failure} error=${error} />
      ${heads.length === 0 && html`<p class="dim" role="status">
        Watch a layer and start a turn. Then each head shows, row by row, how much each token looks at those before it.
      </p>`}
      <div class="heads-grid">${heads.map((head) => html`<${Head} key=${head.name} head=${head} />`)}</div>
    </section>
  `;
}

function Head({ head }) {
  const canvas = useRef(null);
  useEffect(() => draw(canvas.current, head), [head]);
  const { name, end, most } = head;
  const said = `${name}: position ${end - 1} looks most at position ${most.key}, ${percent(most.share)}`;
  return html`<figure>
    <canvas ref=${canvas} role="img" aria-label=${said} title=${said}></canvas>
    <figcaption class="dim">${name}</figcaption>
  </figure>`;
}

/** A cell for each query and key; the darker, the more. */
function draw(canvas, { first, end, rows }) {
  canvas.width = canvas.height = end - first;
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(canvas).color;
  for (const [position, shares] of rows) {
    for (let key = first; key <= position; key++) {
      context.globalAlpha = shares[key];
      context.fillRect(key - first, position - first, 1, 1);
    }
  }
}

/** What was captured of the layer's patterns: for each head `{name, first, end, rows, most}`. `rows` has, by position,
 * the share of each key; `most` is the key that the last position looks at most. Later passes take the place of those
 * before. */
async function readHeads(id, layer) {
  const records = read(await download(`/v1/sessions/${id}/captures?point=pattern&layer=${layer}`));
  const heads = new Map();
  for (const { shape: [, count, keys], values, told } of records) {
    const { positions, heads: numbers } = JSON.parse(told);
    for (let at = 0; at < count; at++) {
      const number = numbers?.[at] ?? at;
      if (!heads.has(number)) heads.set(number, new Map());
      positions.forEach((position, row) => {
        const start = (row * count + at) * keys;
        heads.get(number).set(position, values.subarray(start, start + keys));
      });
    }
  }
  return [...heads].sort(([one], [other]) => one - other).map(([number, rows]) => {
    const end = Math.max(...rows.keys()) + 1;
    const last = rows.get(end - 1);
    const share = Math.max(...last);
    return { name: `Head ${number}`, first: Math.max(0, end - MOST), end, rows, most: { key: last.indexOf(share), share } };
  });
}
