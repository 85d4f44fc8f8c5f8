// The keys that work on the page, in a dialog that `?` opens.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { html } from "../lib/html.js";
import { HOME, go } from "../state/route.js";

/** Whether the dialog is open. */
export const helping = signal(false);

const KEYS = [
  [["?"], "open this help"],
  [["/"], "find a session by its id or a tag"],
  [["g"], "go to all sessions"],
  [["Tab"], "go to the next control; the board is one"],
  [["←", "→", "↑", "↓"], "go from session to session on the board"],
  [["Home", "End"], "go to the first or last session of the board"],
  [["Enter"], "open the session, or press the button"],
  [["Esc"], "close a dialog, and keep everything as it was"],
];

export function Help() {
  const dialog = useRef(null);
  useEffect(() => {
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  useEffect(() => {
    if (helping.value) dialog.current.showModal();
    else dialog.current.close();
  }, [helping.value]);
  return html`<dialog class="help" ref=${dialog} aria-labelledby="help-title" onClose=${() => (helping.value = false)}>
    <div class="stack">
      <h2 id="help-title">Keyboard</h2>
      <dl>${KEYS.map(([keys, does]) => html`<dt>${keys.map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${does}</dd>`)}</dl>
      <div class="row"><button onClick=${() => (helping.value = false)}>Close</button></div>
    </div>
  </dialog>`;
}

/** Keys of the whole page; a key that is typed into a field is a letter. */
function press(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, textarea, select, dialog[open], [contenteditable]")) return;
  if (event.key === "?") helping.value = true;
  else if (event.key === "g") go(HOME);
  else if (event.key === "/" && document.getElementById("search")) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
}
