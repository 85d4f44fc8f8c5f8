// Opens a new session, with labels if one likes.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../../lib/api.js";
import { html } from "../../lib/html.js";
import { go, linkTo } from "../../state/route.js";
import { put } from "../../state/sessions.js";

/** Whether the form is open. */
export const creating = signal(false);

export function CreateDialog() {
  const dialog = useRef(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (creating.value) dialog.current.showModal();
    else dialog.current.close();
  }, [creating.value]);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await create(new FormData(event.target));
      event.target.reset();
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  return html`<dialog ref=${dialog} aria-labelledby="create-title" onClose=${() => (creating.value = false)}>
    <form class="stack" onSubmit=${submit}>
      <h2 id="create-title">New session</h2>
      <label class="stack">
        <span>Metadata, if you like: one <code>name: value</code> on each line</span>
        <textarea name="metadata" rows="4" placeholder="name: researcher-1" aria-describedby="create-error"></textarea>
      </label>
      <label><input type="checkbox" name="guaranteed" /> Guaranteed: its KV never gives way to other sessions</label>
      <p class="failure" id="create-error" role="alert">${error?.message}</p>
      <div class="row ends">
        <button type="button" onClick=${() => (creating.value = false)}>Cancel</button>
        <button class="primary">Open the session</button>
      </div>
    </form>
  </dialog>`;
}

async function create(form) {
  const residency = form.has("guaranteed") ? "guaranteed" : "best_effort";
  const view = await call("POST", "/v1/sessions", { body: { metadata: labels(form.get("metadata")), residency } });
  put(view);
  creating.value = false;
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
