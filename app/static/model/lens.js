// The ladder of layers beside the heatmap of the lens, and the cell that is looked at.
import { html } from "../lib/html.js";
import { Failure } from "../shell/states.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { clearCaptures, toggleWatch, watchOf } from "./arming.js";
import { Cell } from "./cell.js";
import { Heatmap, useWindow } from "./heatmap.js";
import { Ladder } from "./ladder.js";

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
        <span class="dim">Click a layer to pause after it</span>
        <label><span class="hidden">Pause</span>
          <select aria-label="How often to pause" value=${how.once ? "once" : "each"}
            onChange=${(event) => setHow({ once: event.target.value === "once" })}>
            <option value="once">once</option><option value="each">each time</option>
          </select>
        </label>
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
      <button type="button" onClick=${() => attempt("Clear", () => clearCaptures(desk))}
        title="Forget what was captured, on the server too">Clear the map</button>
      <p class="row key dim" aria-hidden="true">
        <i class="mark pause"></i>pauses <i class="mark capture"></i>captures <i class="mark edit"></i>edits
      </p>
      <p class="row key dim">0 % <i class="scale"></i> 100 %</p>
      <p class="hidden" role="status">${desk.lens.loading.value ? "Computing the lens" : ""}</p>
    </div>
  `;
}
