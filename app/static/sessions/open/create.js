// Opens a new session, with labels if one likes.
import { call } from "../../lib/api.js";
import { html } from "../../lib/html.js";
import { Button, Failure, useAction } from "../../shell/controls.js";
import { Dialog } from "../../shell/dialog.js";
import { perKey } from "../../state/per_key.js";
import { go, linkTo } from "../../state/route.js";
import { add } from "../../state/sessions.js";

/** Whether the form is open. */
export const creating = perKey(false);
const leave = () => (creating.value = false);

export const CreateDialog = () => creating.value && html`<${Dialog} title="New session" onClose=${leave}><${Form} /><//>`;

function Form() {
  const { busy, error, act } = useAction();
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    act(() => create(form));
  };
  return html`<form class="stack" onSubmit=${submit}>
    <label class="stack">
      <span>Metadata, if you like: one <code>name: value</code> on each line</span>
      <textarea name="metadata" rows="4" placeholder="name: researcher-1"></textarea>
    </label>
    <label><input type="checkbox" name="guaranteed" /> Guaranteed: its KV never gives way to other sessions</label>
    <${Failure} error=${error} />
    <div class="row ends">
      <button type="button" onClick=${leave}>Cancel</button>
      <${Button} type="submit" class="primary" disabled=${busy}>Open the session<//>
    </div>
  </form>`;
}

async function create(form) {
  const residency = form.has("guaranteed") ? "guaranteed" : "best_effort";
  const view = await call("POST", "/v1/sessions", { body: { metadata: labels(form.get("metadata")), residency } });
  add(view);
  leave();
  go(linkTo(view.id));
}

/** The labels of a text, a line each. */
function labels(text) {
  const found = {};
  for (const line of text.split("\n").filter((each) => each.trim() !== "")) {
    const colon = line.indexOf(":");
    if (colon < 1) throw new Error(`Metadata: "${line}" has no "name: value".`);
    found[line.slice(0, colon).trim()] = line.slice(colon + 1).trim();
  }
  return found;
}
