// The ladder of layers beside the heatmap of the lens, and the cell that is looked at: its tokens with their
// probabilities, and the path of one of them over the layers.
import { useRef, useState } from "preact/hooks";
import { nameOf, number, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Failure, Folded } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { attempt, complain, say } from "../state/notices.js";
import { AFTER, points, where } from "../state/points.js";
import { all } from "../state/sessions.js";
import { clearCaptures, marksOf, pausing, togglePause, toggleWatch, watching, watchOf } from "./arming.js";
import { Heatmap, useWindow } from "./heatmap.js";
import { askedOf, leadOf, MEASURES } from "./lens_map.js";
import { LineChart } from "./norms.js";

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
      <${Folded} title="Pauses, and what cells show"><fieldset class="row tight">
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
      <${Measure} desk=${desk} />
      <${CopyAs} of=${{
        "the lens": () => [["GET", `/v1/sessions/${desk.id}/lens`, { query: { positions: rangeOf(desk), top_k: 5, ...askedOf(desk.measure.peek()) } }]],
        "a pause": () => [pausing(desk, desk.cell.peek()?.layer ?? layers - 1, how)],
        "the watch": () => [watching(desk, layers)],
      }} /><//>
      <${Computing} desk=${desk} />
    </div>
  `;
}

/** The positions of a map that one call can have: the last ones. */
const rangeOf = ({ lens: { end } }) => `${Math.max(0, end.peek() - 64)}:${end.peek()}`;

/** What the cells show. A token's measures are about the one of the list that was chosen last, or the answer. */
function Measure({ desk }) {
  const { kind, text, beside } = desk.measure.value;
  const others = () => all().filter(({ id, tokens }) => id !== desk.id && tokens > 0);
  const choose = ({ target }) => {
    const { ofToken, ofSession } = MEASURES[target.value];
    const { tokenId, text: its } = ofToken ? tokenOf(desk) : { tokenId: null, text: null };
    const other = ofSession ? others()[0]?.id : null;
    if (other !== undefined) desk.measure.value = { kind: target.value, tokenId, text: its, beside: other };
    else say("There is no other session with tokens to compare with.", "error");
    target.value = desk.measure.peek().kind;
  };
  return html`<label>Cells show
    <select value=${kind} onChange=${choose}>${Object.entries(MEASURES).map(([name, { label }]) => html`<option value=${name}>${label}</option>`)}</select>
    ${MEASURES[kind].ofSession && html`<select aria-label="The other session" value=${beside} onChange=${({ target }) => (desk.measure.value = { ...desk.measure.peek(), beside: target.value })}>
      ${others().map((view) => html`<option key=${view.id} value=${view.id}>${nameOf(view)}</option>`)}</select>`}
    ${MEASURES[kind].ofToken && html`<code>${visible(text)}</code>`}
    ${["top", "p"].includes(kind) && html`<span class="row key">0 % <i class="scale"></i> 100 %</span>`}
  </label>`;
}

/** `{tokenId, text}`: the pinned token, or else what the model says last where one looks. */
function tokenOf(desk) {
  if (desk.pinned.peek()) return desk.pinned.peek();
  const position = desk.cell.peek()?.position ?? desk.lens.end.peek() - 1;
  return leadOf(desk.lens.column(position))?.token ?? { tokenId: 0, text: "" };
}

/** How far the map is. It keeps its place when there is nothing to wait for. */
function Computing({ desk }) {
  void desk.lens.version.value;
  const isLoading = desk.lens.loading.value;
  const { done, all } = desk.lens.progress();
  return html`<p class="row tight computing dim">
    <span class="hidden" role="status">${isLoading ? "Computing the lens" : ""}</span>
    ${isLoading && all > 0 && html`<progress aria-label="The lens" max=${all} value=${done}></progress><span aria-hidden="true">${number(done)} of ${number(all)}</span>`}
  </p>`;
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
      <${Lead} column=${column} />
      <ol class="tops">
        ${(top ?? []).map((token) => html`<${Top} key=${token.tokenId} desk=${desk} token=${token} />`)}
      </ol>
      <${Path} desk=${desk} />
    </aside>
  `;
}

function summary(cell, column, top) {
  if (!cell) return html`<span class="dim">Choose a cell to see its tokens. Arrow keys move the choice.</span>`;
  const here = `Layer ${cell.layer}, position ${cell.position}`;
  if (!top) return html`${here}: <span class="dim">nothing is captured here.</span>`;
  const [best] = top;
  return html`${here}, after ${code(column.text)}: ${code(best.text)} <b>${percent(best.p)}</b>`;
}

/** Where the last answer of a column takes the lead. */
function Lead({ column }) {
  const lead = leadOf(column);
  if (!lead) return html`<p class="lead" />`;
  const isLast = lead.last === server.value.num_layers - 1;
  return html`<p class="lead">${code(lead.token.text)} leads from <b>layer ${lead.layer}</b> on${isLast ? "" : ", so far"}.</p>`;
}

const code = (text) => html`<code>${visible(text)}</code>`;

function Top({ desk, token }) {
  const { position } = desk.cell.value;
  const pinned = desk.pinned.value;
  const isPinned = pinned?.tokenId === token.tokenId && pinned.position === position;
  const pin = () => {
    desk.pinned.value = isPinned ? null : { tokenId: token.tokenId, text: token.text, position };
    const { kind } = desk.measure.peek();
    if (!isPinned && MEASURES[kind].ofToken) desk.measure.value = { kind, tokenId: token.tokenId, text: token.text, beside: null };
  };
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
  const { rows = new Map(), values: measured } = desk.lens.column(pinned.position) ?? {};
  const { kind, tokenId } = desk.measure.value;
  const isMeasured = kind === "p" && tokenId === pinned.tokenId;
  const at = (layer) => (isMeasured ? measured?.get(layer) : rows.get(layer)?.find((token) => token.tokenId === pinned.tokenId)?.p) ?? null;
  const values = Array.from({ length: server.value.num_layers }, (_, layer) => at(layer));
  return html`
    <div class="path stack">
      <h3><code>${visible(pinned.text)}</code> at position ${pinned.position}, by layer</h3>
      <${LineChart} label="Probability of ${visible(pinned.text)} by layer" values=${values} from=${0}
        format=${percent} />
      ${!isMeasured && html`<p class="dim">A layer has no point where the token is not among the five best. Let cells show its probability to see all.</p>`}
    </div>
  `;
}

const MOVES = { ArrowUp: -1, ArrowDown: 1, PageUp: -8, PageDown: 8, Home: -Infinity, End: Infinity };

/** The layers of the model, from the first to the last: where the turn stands, and which layers have breakpoints. */
function Ladder({ desk }) {
  const list = useRef(null);
  const count = server.value.num_layers;
  const standing = desk.session.value.checkpoint?.layer ?? null;
  void desk.lens.version.value;
  const lead = desk.cell.value && leadOf(desk.lens.column(desk.cell.value.position));
  const [current, setCurrent] = useState(standing ?? 0);
  const move = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(count - 1, Math.max(0, current + by));
    setCurrent(next);
    list.current.children[next].firstElementChild.focus({ preventScroll: next === current });
  };
  const arm = (layer) => {
    setCurrent(layer);
    togglePause(desk, layer, desk.how.peek(), count).catch((error) => complain(`Layer ${layer}`, error));
  };
  return html`
    <div class="ladder">
      <div class="corner dim" aria-hidden="true">layer</div>
      <ol ref=${list} aria-label="Layers: choose one to pause after it" onKeyDown=${move}>
        ${Array.from({ length: count }, (_, layer) => html`<${Rung} key=${layer} layer=${layer} standing=${standing}
          marks=${marksOf(desk.breakpoints.value, layer)} how=${desk.how.value} tab=${layer === current} leads=${lead?.layer === layer ? lead.token.text : null} arm=${arm} />`)}
      </ol>
    </div>
  `;
}

/** `leads` is the text of the token that takes the lead here, in the column that is looked at, or null. */
function Rung({ layer, standing, marks, how, tab, leads, arm }) {
  const { pauses, captures, edits } = marks;
  const place = standing === null ? "" : layer === standing ? "here" : layer < standing ? "passed" : "";
  return html`<li class=${leads === null ? place : `${place} leads`}>
    <button tabindex=${tab ? 0 : -1} aria-pressed=${pauses.length > 0}
      aria-label=${spoken(layer, marks, place)}
      title=${pauses.length ? `Remove the pause ${where(pauses[0].point, [layer])}` : `Pause ${where(how.point, [layer])}`}
      onClick=${() => arm(layer)}>
      <i class="mark pause ${pauses.length ? "" : "off"} ${pauses.every((each) => each.once) ? "" : "each"}"></i>
      <span class="number">${layer}</span>
      <i class="mark capture ${captures.length ? "" : "off"}"></i>
      <i class="mark edit ${edits.length ? "" : "off"}"></i>
      <span class="stands">${place === "here" ? "paused" : leads !== null && visible(leads)}</span>
    </button>
  </li>`;
}

function spoken(layer, { pauses, captures, edits }, place) {
  const said = [`Layer ${layer}`];
  for (const { once, when } of pauses) said.push(`pauses ${once ? "once" : "each time"} in ${when.pass} pass`);
  if (captures.length) said.push("captures");
  if (edits.length) said.push("edits");
  if (place === "here") said.push("the turn stands here");
  return said.join(", ");
}
