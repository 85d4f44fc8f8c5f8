// One session as a row, with what can be done to it.
import { html } from "../../lib/html.js";
import { sessionOf } from "../../state/sessions.js";
import { nameOf } from "../board/cell.js";
import { callBack, closing, forgive, park, refusals, whyNoCall, whyNoPark } from "./actions.js";
import { COLUMNS } from "./columns.js";

export function Row({ id, index }) {
  const view = sessionOf(id).value;
  if (view === null) return null;
  return html`<tr aria-rowindex=${index + 2} data-id=${id}>
    ${COLUMNS.map(({ title, isNumber, cell }) => html`<td key=${title} class=${isNumber ? "number" : null}>${cell(view)}</td>`)}
    <td class="actions"><div><${Actions} view=${view} /></div></td>
  </tr>`;
}

function Actions({ view }) {
  const refusal = refusals.value[view.id];
  if (refusal) {
    return html`<span class="failure" role="alert" title=${refusal}>${refusal}</span>
      <button class="quiet" aria-label="Close this message" onClick=${() => forgive(view.id)}>✕</button>`;
  }
  return html`
    <${Action} view=${view} why=${whyNoPark(view)} act=${park} title="KV leaves the device (phase io_wait)">Park<//>
    <${Action} view=${view} why=${whyNoCall(view)} act=${callBack} title="KV comes back (phase ready)">Call back<//>
    <button class="danger" aria-label=${`Close ${nameOf(view)}`} onClick=${() => (closing.value = view.id)}>Close</button>
  `;
}

const Action = ({ view, why, act, title, children }) => html`<button
  disabled=${why !== null} title=${why ?? title} aria-label=${`${children} ${nameOf(view)}${why ? `: ${why}` : ""}`}
  onClick=${() => act(view.id)}
>${children}</button>`;
