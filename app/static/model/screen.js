// The screen inside the model: one session, layer by layer.
import { useEffect } from "preact/hooks";
import { counted, positions } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Foreign, isForeign, TimeLeft } from "../session/screen.js";
import { Loading, Named } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { historyOf, loadHistory } from "../state/history.js";
import { attempt } from "../state/notices.js";
import { loadPoints, where } from "../state/points.js";
import { linkTo } from "../state/route.js";
import { turnWord } from "../state/sessions.js";
import { Attention } from "./attention.js";
import { attend, deskOf, show } from "./desk.js";
import { Compare, EditForm } from "./edit_form.js";
import { Features } from "./features.js";
import { Lens } from "./lens.js";
import { Norms } from "./norms.js";
import { Steering } from "./steering.js";
import { Throughput, Turn } from "./turn.js";
import { refreshVectors, Vectors } from "./vectors.js";

export function ModelScreen({ id }) {
  const desk = deskOf(id);
  const view = desk.session.value;
  const { tokens, error } = historyOf(id).value;
  const isUnsure = view.tenant !== null && tokens === null && error === null;
  useEffect(() => void (isUnsure && loadHistory(id)), [id, isUnsure]);
  if (server.value === null || isUnsure) return html`<${Loading} what="the inside of the model" />`;
  return html`
    <div class="model">
      <${Standing} desk=${desk} />
      ${isForeign(view) ? html`<${Foreign} view=${view} />` : html`<${Inside} desk=${desk} />`}
    </div>
  `;
}

/** What only its tenant sees. */
function Inside({ desk }) {
  useEffect(() => void attempt("Points", loadPoints), []);
  useEffect(() => {
    refreshVectors();
    addEventListener("focus", refreshVectors); // other tabs and programs keep and delete them too
    return () => removeEventListener("focus", refreshVectors);
  }, []);
  useEffect(() => attend(desk), [desk]);
  return html`
    <${Turn} desk=${desk} />
    <${Throughput} id=${desk.id} />
    <${Lens} desk=${desk} />
    <${Attention} desk=${desk} />
    <${Steering} />
    <${EditForm} desk=${desk} />
    <${Compare} desk=${desk} />
    <${Features} desk=${desk} />
    <${Norms} desk=${desk} />
    <${Vectors} />
  `;
}

/** Panels below the lens, by their class. */
const PARTS = ["Attention", "Steering", "Edit", "Features", "Vectors"];

function Standing({ desk }) {
  const view = desk.session.value;
  return html`
    <header class="standing row">
      <h1>Inside the model</h1>
      <a href=${linkTo(desk.id)} title=${desk.id}><${Named} view=${view} /></a>
      <p role="status"><${Place} view=${view} /></p>
      ${view.checkpoint && html`<p class="dim"><${TimeLeft} ...${view.checkpoint} /></p>`}
      <nav class="row" aria-label="Below the lens">${PARTS.map((name) => html`<button class="quiet" onClick=${() => show(name.toLowerCase())}>${name}</button>`)}</nav>
    </header>
  `;
}

function Place({ view }) {
  const { state, checkpoint, tokens } = view;
  if (!checkpoint) return html`<strong class="state ${state}">${turnWord(view)}</strong> ${counted(tokens, "token")}`;
  const { layer, point, pass } = checkpoint;
  return html`
    <strong class="state paused">paused</strong> ${where(point, [layer])} of ${server.value.num_layers - 1}, ${pass} of ${positions(checkpoint)}
  `;
}
