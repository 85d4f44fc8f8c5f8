// Closes a session, after a question: it is gone for good then.
import { call } from "../lib/api.js";
import { counted, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { perKey } from "../state/per_key.js";
import { go, HOME, route } from "../state/route.js";
import { remove, sessionOf } from "../state/sessions.js";
import { Button } from "./controls.js";
import { Confirm } from "./dialog.js";

/** The session that is about to be closed, if it is confirmed; null: none. */
const closing = perKey(null);

export const CloseButton = ({ view, ...rest }) => html`
  <${Button} class="danger" ...${rest} onClick=${() => (closing.value = view.id)}>Close<//>
`;

/** The question, if there is one. */
export function CloseDialog() {
  const id = closing.value;
  const view = id && sessionOf(id).value;
  if (!view) return null;
  return html`<${Confirm} key=${id} title="Close session ${nameOf(view)}?" action="Close the session"
    run=${() => close(id)} onClose=${() => (closing.value = null)}>
    Its ${counted(view.tokens, "token")} and their KV are gone then${view.state === "idle" ? "" : ", and its turn ends"}.
    Export it first if you want to keep them. <span class="mono dim">${id}</span>
  <//>`;
}

async function close(id) {
  await call("DELETE", `/v1/sessions/${id}`);
  if (route.peek().id === id) go(HOME);
  remove(id);
}
