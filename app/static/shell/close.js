// Closes sessions, after a question: they are gone for good then.
import { call } from "../lib/api.js";
import { counted, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { perKey } from "../state/per_key.js";
import { go, HOME, route } from "../state/route.js";
import { remove, sessionOf } from "../state/sessions.js";
import { Button } from "./controls.js";
import { Confirm } from "./dialog.js";

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
    await call("DELETE", `/v1/sessions/${id}`);
    if (route.peek().id === id) go(HOME);
    remove(id);
  }
}
