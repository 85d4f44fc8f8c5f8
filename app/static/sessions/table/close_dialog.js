// Asks before a session is closed.
import { useEffect, useRef } from "preact/hooks";
import { counted } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { sessionOf } from "../../state/sessions.js";
import { nameOf } from "../board/cell.js";
import { close, closing, refusals } from "./actions.js";

export function CloseDialog() {
  const dialog = useRef(null);
  const id = closing.value;
  const view = id && sessionOf(id).value;
  useEffect(() => {
    if (view && !dialog.current.open) dialog.current.showModal();
    if (!view) dialog.current.close();
  }, [view]);
  const leave = () => (closing.value = null);
  const go = async () => (await close(id)) && leave();
  return html`<dialog ref=${dialog} aria-labelledby="close-title" onClose=${leave}>
    ${view &&
    html`<div class="stack">
      <h2 id="close-title">Close session ${nameOf(view)}?</h2>
      <p>Its ${counted(view.tokens, "token")} and its KV are gone then${view.state === "idle" ? "" : ", and its turn ends"}.</p>
      <p class="mono dim">${id}</p>
      <p class="failure" role="alert">${refusals.value[id]}</p>
      <div class="row ends">
        <button onClick=${leave}>Keep it</button>
        <button class="danger" onClick=${go}>Close the session</button>
      </div>
    </div>`}
  </dialog>`;
}
