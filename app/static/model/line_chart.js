// A small chart of a value by layer.
import { html } from "../lib/html.js";
import { pathOf } from "../lib/paths.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [320, 130, 46, 20, 8];

/** `values` has a number, or null, for each layer; the axis begins at `from`, or at the lowest value. */
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
