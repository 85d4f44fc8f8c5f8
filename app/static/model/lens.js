// The ladder of layers beside the heatmap of the lens, and the cell that is looked at: its tokens with their
// probabilities, and the path of one of them over the layers.
import { percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Failure } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { AFTER, points } from "../state/points.js";
import { clearCaptures, toggleWatch, watchOf } from "./arming.js";
import { Heatmap, useWindow } from "./heatmap.js";
import { Ladder } from "./ladder.js";
import { LineChart } from "./line_chart.js";

export function Lens({ desk }) {
  const window = useWindow(desk);
  const error = desk.lens.error.value;
  return html`
    <section class="panel lens" aria-labelledby="lens-title">
      <${Tools} desk=${desk} />
      <${Failure} error=${error} retry=${() => desk.lens.want(window.first, window.end)} />
      <div class="inside" ref=${window.box} onScroll=${window.onScroll}>
        <${Ladder} desk=${desk} />
        <${Heatmap} desk=${desk} window=${window} />
      </div>
      <${Cell} desk=${desk} />
    </section>
  `;
}

function Tools({ desk }) {
  const layers = server.value.num_layers;
  const how = desk.how.value;
  const setHow = (changed) => (desk.how.value = { ...how, ...changed });
  const watched = Boolean(watchOf(desk.breakpoints.value, layers));
  const watch = () => attempt("Watch", () => toggleWatch(desk, layers));
  return html`
    <div class="row tools">
      <h2 id="lens-title">Layers and lens</h2>
      <fieldset class="row tight">
        <legend class="hidden">A pause that a click on a layer arms</legend>
        <span class="dim">Click a layer to pause</span>
        <select aria-label="How often to pause" value=${how.once ? "once" : "each"}
          onChange=${(event) => setHow({ once: event.target.value === "once" })}>
          <option value="once">once</option><option value="each">each time</option>
        </select>
        <select aria-label="Where in the layer to pause" value=${how.point}
          onChange=${(event) => setHow({ point: event.target.value })}>
          <option value=${AFTER}>after it</option>
          ${pausable().map((name) => html`<option key=${name} value=${name}>at ${name}</option>`)}
        </select>
        <label>in
          <select aria-label="In which pass to pause" value=${how.pass}
            onChange=${(event) => setHow({ pass: event.target.value })}>
            <option value="any">any pass</option>
            <option value="prefill">prefill</option>
            <option value="decode">decode</option>
          </select>
        </label>
      </fieldset>
      <label>
        <input type="checkbox" checked=${watched} onChange=${watch} />
        Watch all layers</label>
      <button onClick=${() => attempt("Clear", () => clearCaptures(desk))}
        title="Forget what was captured, on the server too">Clear the map</button>
      <p class="row key dim" aria-hidden="true">
        <i class="mark pause"></i>pauses <i class="mark capture"></i>captures <i class="mark edit"></i>edits
      </p>
      <p class="row key dim">0 % <i class="scale"></i> 100 %</p>
      <p class="hidden" role="status">${desk.lens.loading.value ? "Computing the lens" : ""}</p>
    </div>
  `;
}

const pausable = () => [...new Set(points.value.filter(({ layers, no_pause }) => layers && !no_pause).map(({ name }) => name))]
  .filter((name) => name !== AFTER);

function Cell({ desk }) {
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
    <button aria-pressed=${isPinned} onClick=${pin} title="Draw this token's path over the layers">
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
