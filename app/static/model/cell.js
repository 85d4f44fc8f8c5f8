// One cell of the heatmap: its tokens with their probabilities, and the path of one of them over the layers.
import { percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { server } from "../state/connection.js";
import { LineChart } from "./line_chart.js";

export function Cell({ desk }) {
  void desk.lens.version.value;
  const cell = desk.cell.value;
  const column = cell && desk.lens.column(cell.position);
  const top = column?.rows.get(cell.layer);
  return html`
    <aside class="details stack" aria-label="The chosen cell">
      <p role="status">${summary(cell, column, top)}</p>
      <ol class="tops">
        ${(top ?? []).map((token) => html`<${Top} key=${token.tokenId} desk=${desk} token=${token} />`)}
      </ol>
      <${Path} desk=${desk} />
    </aside>
  `;
}

function summary(cell, column, top) {
  if (!cell) return html`<span class="dim">Choose a cell to see its tokens. Arrow keys move the choice.</span>`;
  const where = `Layer ${cell.layer}, position ${cell.position}`;
  if (!top) return html`${where}: <span class="dim">nothing is captured here.</span>`;
  const [best] = top;
  return html`${where}, after ${code(column.text)}: ${code(best.text)} <b>${percent(best.p)}</b>`;
}

const code = (text) => html`<code>${visible(text)}</code>`;

function Top({ desk, token }) {
  const { position } = desk.cell.value;
  const pinned = desk.pinned.value;
  const isPinned = pinned?.tokenId === token.tokenId && pinned.position === position;
  const pin = () => (desk.pinned.value = isPinned ? null : { tokenId: token.tokenId, text: token.text, position });
  return html`<li>
    <button type="button" aria-pressed=${isPinned} onClick=${pin} title="Draw this token's path over the layers">
      <code>${visible(token.text)}</code><span class="bar" style=${{ "--p": `${100 * token.p}%` }}></span>
      <span class="number">${percent(token.p)}</span>
    </button>
  </li>`;
}

/** The probability of the pinned token after each layer. It is known only where the token is among the best. */
function Path({ desk }) {
  const pinned = desk.pinned.value;
  if (!pinned) return html`<p class="path dim">Choose a token of the list to see its path over the layers.</p>`;
  const rows = desk.lens.column(pinned.position)?.rows ?? new Map();
  const at = (layer) => rows.get(layer)?.find((token) => token.tokenId === pinned.tokenId)?.p ?? null;
  const values = Array.from({ length: server.value.num_layers }, (_, layer) => at(layer));
  return html`
    <div class="path stack">
      <h3><code>${visible(pinned.text)}</code> at position ${pinned.position}, by layer</h3>
      <${LineChart} label="Probability of ${visible(pinned.text)} by layer" values=${values} from=${0}
        format=${percent} />
      <p class="dim">A layer has no point where the token is not among the five best.</p>
    </div>
  `;
}
