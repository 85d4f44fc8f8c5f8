// Asks before something that cannot be undone. What goes wrong is said inside, and the question stays open.
import { useEffect, useRef } from "preact/hooks";
import { html } from "../lib/html.js";
import { Failure } from "./states.js";
import { useAction } from "./use_action.js";

/** `action` is the button's text, `run` what it does; `onClose` is called when there is nothing more to ask. */
export function Confirm({ title, children, action, run, onClose }) {
  const dialog = useRef(null);
  const { busy, error, act } = useAction();
  useEffect(() => {
    const asked = document.activeElement;
    dialog.current.showModal();
    return () => (asked.isConnected && !asked.disabled ? asked : document.getElementById("main")).focus();
  }, []);
  const confirm = async () => {
    const { done } = await act(run);
    if (done) onClose();
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="confirm-title" onClose=${onClose}>
      <div class="stack">
        <h2 id="confirm-title">${title}</h2>
        <p>${children}</p>
        ${error && html`<${Failure} error=${error} />`}
        <div class="row">
          <button onClick=${onClose}>Leave it</button>
          <button class="danger" disabled=${busy} onClick=${confirm}>${action}</button>
        </div>
      </div>
    </dialog>
  `;
}
