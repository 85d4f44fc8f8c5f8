// What becomes of each file that is dropped on the screen of all sessions, or chosen there.
import { useRef } from "preact/hooks";
import { bytes, nameOf } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Button } from "../../shell/controls.js";
import { Icon } from "../../shell/icons.js";
import { importFile } from "../../shell/import.js";
import { perKey } from "../../state/per_key.js";
import { linkTo } from "../../state/route.js";

/** `{id, name, size, state, ...}` of each file: `state` is `sending`, `done` with a `view`, or `failed` with an `error`. */
const imports = perKey([]);
let last = 0;

export function ImportButton() {
  const field = useRef(null);
  const take = (event) => {
    importAll([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <input ref=${field} type="file" class="hidden" tabindex="-1" multiple accept=".safetensors" aria-label="Session files" onChange=${take} />
    <${Button} title="or drop a file anywhere on this screen" onClick=${() => field.current.click()}>Import a file<//>
  `;
}

export const Imports = () => html`<ul class="imports" aria-label="Imports" aria-live="polite">
  ${imports.value.map((each) => html`<li key=${each.id} class=${each.state}><${Outcome} ...${each} /></li>`)}
</ul>`;

function Outcome({ id, name, size, state, view, error, file }) {
  return html`
    <span><b>${name}</b> (${bytes(size)}): </span>
    ${state === "sending" && html`<span class="grow">importing <progress aria-label=${`Importing ${name}`}></progress></span>`}
    ${state === "done" && html`<span class="grow">is <a href=${linkTo(view.id)}>session ${nameOf(view)}</a> now${isWithoutKV(view) &&
    ". Its KV was not kept, as this server has no disk tier: the next turn computes it again"}</span>`}
    ${state === "failed" && html`<span class="grow failure" role="alert">${error.message}</span>`}
    ${state === "failed" && html`<button onClick=${() => send(id, file)}>Try again</button>`}
    ${state !== "sending" && html`<button class="quiet" aria-label=${`Forget the import of ${name}`} onClick=${() => drop(id)}><${Icon} name="close" /></button>`}
  `;
}

const isWithoutKV = ({ tokens, kv }) => tokens > 0 && kv.tier === null;

export async function importAll(files) {
  const added = files.map((file) => ({ id: (last += 1), name: file.name, size: file.size, state: "sending", file }));
  imports.value = [...imports.value, ...added];
  for (const { id, file } of added) if (isAsked(id)) await send(id, file);
}

async function send(id, file) {
  change(id, { state: "sending", error: null });
  try {
    change(id, { state: "done", view: await importFile(file) });
  } catch (error) {
    change(id, { state: "failed", error });
  }
}

/** Whether it is still in the list: another key has another list. */
const isAsked = (id) => imports.peek().some((each) => each.id === id);
const change = (id, news) => (imports.value = imports.value.map((each) => (each.id === id ? { ...each, ...news } : each)));
const drop = (id) => (imports.value = imports.value.filter((each) => each.id !== id));
