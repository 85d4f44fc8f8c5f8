// The keys that work on the page, in a dialog that `?` opens.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { html } from "../lib/html.js";
import { HOME, go } from "../state/route.js";
import { Dialog } from "./dialog.js";

/** Whether the dialog is open. */
export const helping = signal(false);

/** Whether keys without Control or Alt do something: speech input and slips of the hand press them too. */
const hasSingleKeys = signal(true);

const KEYS = [
  [["?"], "open this help"],
  [["Ctrl+K"], "go to a session, a screen or an experiment, or do something, by its name"],
  [["/"], "find a session by its id or a tag"],
  [["g"], "go to all sessions"],
  [["Tab"], "go to the next control; the board is one"],
  [["←", "→", "↑", "↓"], "go from session to session on the board"],
  [["Home", "End"], "go to the first or last session of the board"],
  [["Enter"], "open the session, or press the button"],
  [["Esc"], "close a dialog, and keep everything as it was"],
];

export function Help() {
  useEffect(() => {
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  if (!helping.value) return null;
  const close = () => (helping.value = false);
  return html`<${Dialog} title="Keyboard" class="help" onClose=${close}>
    <dl>${KEYS.map(([keys, does]) => html`<dt>${keys.map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${does}</dd>`)}</dl>
    <label class="check"><input type="checkbox" checked=${hasSingleKeys.value}
      onChange=${(event) => (hasSingleKeys.value = event.target.checked)} />The keys ?, / and g work, in this tab</label>
    <div class="row"><button onClick=${close}>Close</button></div>
  <//>`;
}

/** Keys of the whole page; a key that is typed into a field is a letter. */
function press(event) {
  if (!hasSingleKeys.value || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, textarea, select, dialog[open], [contenteditable]")) return;
  if (event.key === "?") helping.value = true;
  else if (event.key === "g") go(HOME);
  else if (event.key === "/" && document.getElementById("search")) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
}
