// Dialogs: one that asks before something that cannot be undone, such as closing sessions, and the help that `?` opens.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { erase } from "../lib/api.js";
import { counted, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { perKey } from "../state/per_key.js";
import { go, HOME, route } from "../state/route.js";
import { remove, sessionOf } from "../state/sessions.js";
import { Button, Failure, useAction } from "./controls.js";

/** Open for as long as it is drawn. `onClose` is called when there is nothing more to show, or another screen; the keys
 * go back to where they were then. */
export function Dialog({ title, onClose, children, ...rest }) {
  const dialog = useRef(null);
  useEffect(() => {
    const asked = document.activeElement;
    const { current } = dialog;
    current.showModal();
    current.onclose = onClose;
    addEventListener("hashchange", onClose);
    return () => {
      removeEventListener("hashchange", onClose);
      onClose();
      current.onclose = null; // it is told later, when another may be open
      current.close(); // until then what is behind it takes no focus
      (asked.isConnected && !asked.disabled ? asked : document.getElementById("main")).focus();
    };
  }, []);
  return html`
    <dialog ref=${dialog} aria-labelledby="dialog-title" ...${rest}>
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

/** Whether the help is open. */
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

/** Ids of those that are about to be closed, if it is confirmed. */
export const closing = perKey([]);

export const CloseButton = ({ view, ...rest }) => html`
  <${Button} class="danger" ...${rest} onClick=${() => (closing.value = [view.id])}>Close<//>
`;

/** The question, if there is one. */
export function CloseDialog() {
  const views = closing.value.map((id) => sessionOf(id).value).filter(Boolean);
  const [view, isMany] = views;
  if (!view) return null;
  const what = isMany ? counted(views.length, "session") : `session ${nameOf(view)}`;
  const tokens = views.reduce((sum, each) => sum + each.tokens, 0);
  return html`<${Confirm} key=${closing.value[0]} title="Close ${what}?" action=${isMany ? `Close ${what}` : "Close the session"}
    run=${() => close(views)} onClose=${() => (closing.value = [])}>
    ${isMany ? "Their" : "Its"} ${counted(tokens, "token")} and their KV are gone then${views.every(({ state }) => state === "idle") ? "" : ", and turns end"}.
    Export ${isMany ? "them" : "it"} first to keep them. ${!isMany && html`<span class="mono dim">${view.id}</span>`}
  <//>`;
}

async function close(views) {
  for (const { id } of views) {
    await erase(`/v1/sessions/${id}`);
    if (route.peek().id === id) go(HOME);
    remove(id);
  }
}
