// Opens sessions from exported files: chosen with a button, or dropped anywhere on the screen.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { upload } from "../../lib/api.js";
import { bytes, shortId } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { linkTo } from "../../state/route.js";
import { put } from "../../state/sessions.js";

/** `{key, name, size, state, ...}` of each file: `state` is `sending`, `done` with a `view`, or `failed` with an `error`. */
const imports = signal([]);
const isOver = signal(false);
let last = 0;

export function ImportButton() {
  const field = useRef(null);
  const take = (event) => {
    importAll([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <input ref=${field} type="file" class="hidden" tabindex="-1" multiple accept=".safetensors" aria-label="Session files" onChange=${take} />
    <button title="or drop a file anywhere on this screen" onClick=${() => field.current.click()}>Import a file</button>
  `;
}

/** What has become of each file. */
export const Imports = () => html`<ul class="imports" aria-label="Imports" aria-live="polite">
  ${imports.value.map((each) => html`<li key=${each.key} class=${each.state}><${Outcome} ...${each} /></li>`)}
</ul>`;

function Outcome({ key: _key, id, name, size, state, view, error, file }) {
  return html`
    <span><b>${name}</b> (${bytes(size)}): </span>
    ${state === "sending" && html`<span class="grow">importing <progress aria-label=${`Importing ${name}`}></progress></span>`}
    ${state === "done" && html`<span class="grow">is <a href=${linkTo(view.id)}>session ${shortId(view.id)}</a> now</span>`}
    ${state === "failed" && html`<span class="grow failure" role="alert">${error.message}</span>`}
    ${state === "failed" && html`<button onClick=${() => send(id, file)}>Try again</button>`}
    ${state !== "sending" && html`<button class="quiet" aria-label=${`Forget the import of ${name}`} onClick=${() => drop(id)}>✕</button>`}
  `;
}

/** Takes files that are dropped anywhere while the screen is open. */
export function DropZone() {
  useEffect(() => listen({ dragover: over, dragleave: leave, drop: dropped }), []);
  return html`<div class="drop-zone ${isOver.value ? "over" : ""}" aria-hidden="true">Drop the file to import its session</div>`;
}

function listen(listeners) {
  for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
  return () => {
    for (const [name, listener] of Object.entries(listeners)) removeEventListener(name, listener);
  };
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

function over(event) {
  if (!hasFiles(event)) return;
  event.preventDefault();
  isOver.value = true;
}

/** The pointer has left the window; it also leaves each element in it. */
function leave(event) {
  if (event.relatedTarget === null) isOver.value = false;
}

function dropped(event) {
  if (!hasFiles(event)) return;
  event.preventDefault();
  isOver.value = false;
  importAll([...event.dataTransfer.files]);
}

async function importAll(files) {
  for (const file of files) {
    const id = (last += 1);
    imports.value = [...imports.value, { key: id, id, name: file.name, size: file.size, state: "sending", file }];
    await send(id, file);
  }
}

async function send(id, file) {
  change(id, { state: "sending", error: null });
  try {
    const view = await upload("POST", "/v1/sessions/import", file);
    put(view);
    change(id, { state: "done", view });
  } catch (error) {
    change(id, { state: "failed", error });
  }
}

const change = (id, news) => (imports.value = imports.value.map((each) => (each.id === id ? { ...each, ...news } : each)));
const drop = (id) => (imports.value = imports.value.filter((each) => each.id !== id));
