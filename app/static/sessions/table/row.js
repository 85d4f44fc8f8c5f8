// One session as a row, with what can be done to it.
import { call } from "../../lib/api.js";
import { nameOf } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { CloseButton } from "../../shell/close.js";
import { Button } from "../../shell/controls.js";
import { isPast } from "../../state/connection.js";
import { perSession } from "../../state/per_key.js";
import { sessionOf } from "../../state/sessions.js";
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
  const refusal = refusalOf(view.id).value;
  if (refusal && !isPast(refusal)) {
    return html`<span class="failure" role="alert" title=${refusal.message}>${refusal.message}</span>
      <button class="quiet" aria-label="Close this message" onClick=${() => (refusalOf(view.id).value = null)}>✕</button>`;
  }
  return html`
    <${Action} view=${view} why=${whyNoPark(view)} act=${park} title="KV leaves the device (phase io_wait)">Park<//>
    <${Action} view=${view} why=${whyNoCall(view)} act=${callBack} title="KV comes back (phase ready)">Call back<//>
    <${CloseButton} view=${view} aria-label=${`Close ${nameOf(view)}`} />
  `;
}

const Action = ({ view, why, act, title, children }) => html`<${Button}
  why=${why} title=${title} aria-label=${`${children} ${nameOf(view)}`} onClick=${() => act(view.id)}
>${children}<//>`;

/** The signal of why a button has done nothing to a session, or null. */
const refusalOf = perSession(null);

/** Why the phase of a session may not be set; null: it may. */
function whyNoPhase({ state }) {
  if (state === "queued" || state === "running") return `A turn is ${state}: the phase can be set when it is over.`;
  return null;
}

const whyNoPark = (view) =>
  whyNoPhase(view) ?? (view.phase === "io_wait" || view.phase === "idle" ? "It is parked already." : null);
const whyNoCall = (view) =>
  whyNoPhase(view) ?? (view.phase === "ready" || view.phase === "compute" ? "It is at hand already." : null);

const park = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "io_wait" } }));
const callBack = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "ready" } }));

async function tell(id, action) {
  const refusal = refusalOf(id);
  refusal.value = null;
  try {
    await action();
  } catch (error) {
    refusal.value = error.status === 404 ? { message: "It is closed, or another tenant's: an operator may only close it." } : error;
  }
}
