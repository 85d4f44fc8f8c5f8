// One session as a row, with what can be done to it.
import { signal } from "@preact/signals";
import { call } from "../../lib/api.js";
import { counted } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Button } from "../../shell/controls.js";
import { Confirm } from "../../shell/dialog.js";
import { remove, sessionOf } from "../../state/sessions.js";
import { nameOf } from "../board/cell.js";
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

const Action = ({ view, why, act, title, children }) => html`<${Button}
  why=${why} title=${title} aria-label=${`${children} ${nameOf(view)}`} onClick=${() => act(view.id)}
>${children}<//>`;

/** Errors by id of the session that a button did not get through to. */
const refusals = signal({});
/** The session that is about to be closed, if it is confirmed; null: none. */
const closing = signal(null);

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

/** Close it for good. */
async function close(id) {
  await call("DELETE", `/v1/sessions/${id}`);
  remove(id);
}

function forgive(id) {
  const { [id]: _gone, ...rest } = refusals.value;
  refusals.value = rest;
}

async function tell(id, action) {
  forgive(id);
  try {
    await action();
  } catch (error) {
    const message = error.status === 404 ? "It is closed, or another tenant's: an operator may only close it." : error.message;
    refusals.value = { ...refusals.value, [id]: message };
  }
}

export function CloseDialog() {
  const id = closing.value;
  const view = id && sessionOf(id).value;
  if (!view) return null;
  return html`<${Confirm}
    key=${id}
    title="Close session ${nameOf(view)}?"
    action="Close the session"
    run=${() => close(id)}
    onClose=${() => (closing.value = null)}
  >
    Its ${counted(view.tokens, "token")} and its KV are gone then${view.state === "idle" ? "" : ", and its turn ends"}.
    <span class="mono dim">${" "}${id}</span>
  <//>`;
}
