// Asks before a session is closed.
import { counted } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Confirm } from "../../shell/confirm.js";
import { sessionOf } from "../../state/sessions.js";
import { nameOf } from "../board/cell.js";
import { close, closing } from "./actions.js";

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
