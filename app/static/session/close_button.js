// Closes a session, after a question.
import { useSignal } from "@preact/signals";
import { call } from "../lib/api.js";
import { counted } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Confirm } from "../shell/confirm.js";
import { go, HOME } from "../state/route.js";
import { remove } from "../state/sessions.js";

export function CloseButton({ view }) {
  const isAsking = useSignal(false);
  return html`
    <button class="danger" onClick=${() => (isAsking.value = true)}>Close</button>
    ${isAsking.value && html`<${Confirm} title="Close this session?" action="Close the session"
      run=${() => close(view.id)} onClose=${() => (isAsking.value = false)}>
      Its ${counted(view.tokens, "token")} and their KV are gone then. Export it first if you want to keep them.
    <//>`}
  `;
}

async function close(id) {
  await call("DELETE", `/v1/sessions/${id}`);
  go(HOME);
  remove(id);
}
