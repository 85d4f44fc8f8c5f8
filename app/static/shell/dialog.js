// Dialogs, among them one that asks before something that cannot be undone.
import { useEffect, useRef } from "preact/hooks";
import { html } from "../lib/html.js";
import { Button, Failure, useAction } from "./controls.js";

/** Open for as long as it is drawn. `onClose` is called when there is nothing more to show, or another screen; the keys
 * go back to where they were then. */
export function Dialog({ title, onClose, children, ...rest }) {
  const dialog = useRef(null);
  useEffect(() => {
    const asked = document.activeElement;
    dialog.current.showModal();
    addEventListener("hashchange", onClose);
    return () => {
      removeEventListener("hashchange", onClose);
      onClose();
      (asked.isConnected && !asked.disabled ? asked : document.getElementById("main")).focus();
    };
  }, []);
  return html`
    <dialog ref=${dialog} aria-labelledby="dialog-title" onClose=${onClose} ...${rest}>
      <div class="stack"><h2 id="dialog-title">${title}</h2>${children}</div>
    </dialog>
  `;
}

/** `action` is the button's text, `run` what it does. What goes wrong is said inside, and the question stays open. */
export function Confirm({ title, children, action, run, onClose }) {
  const { busy, error, act } = useAction();
  const confirm = async () => {
    const { done } = await act(run);
    if (done) onClose();
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <p>${children}</p>
    <${Failure} error=${error} />
    <div class="row">
      <button onClick=${onClose}>Leave it</button>
      <${Button} class="danger" disabled=${busy} onClick=${confirm}>${action}<//>
    </div>
  <//>`;
}
