// New sessions: with labels if one likes, or from exported files that are dropped anywhere on the screen, or chosen.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { call, upload } from "../lib/api.js";
import { bytes, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button, Failure, useAction } from "../shell/controls.js";
import { Dialog } from "../shell/dialog.js";
import { Icon } from "../shell/icons.js";
import { perKey } from "../state/per_key.js";
import { go, linkTo } from "../state/route.js";
import { add } from "../state/sessions.js";

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
    ${state !== "sending" && html`<button class="quiet" aria-label=${`Forget the import of ${name}`} onClick=${() => forget(id)}><${Icon} name="close" /></button>`}
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
const forget = (id) => (imports.value = imports.value.filter((each) => each.id !== id));

const isOver = signal(false);

/** Open a session from a file; its view. */
export async function importFile(file) {
  const view = await upload("POST", "/v1/sessions/import", file);
  add(view);
  return view;
}

/** Tells `take` of files that are dropped on the screen while this is drawn. Beside a small target the browser would
 * leave the page for them. */
export function DropZone({ take }) {
  useEffect(() => listen({ dragover: over, dragleave: out, drop: (event) => drop(event, take) }), []);
  return html`<div class="drop-zone ${isOver.value ? "over" : ""}" aria-hidden="true">Drop the file to import its session</div>`;
}

/** A file that is dropped where no `DropZone` is drawn must not take the page's place, until the answer is called. */
export const keepPage = () => listen({ dragover: hold, drop: hold });

const hold = (event) => hasFiles(event) && event.preventDefault();

function listen(listeners) {
  for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
  return () => {
    for (const [name, listener] of Object.entries(listeners)) removeEventListener(name, listener);
  };
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

function over(event) {
  hold(event);
  isOver.value = hasFiles(event);
}

/** The pointer has left the window; it also leaves each element in it. */
function out(event) {
  if (event.relatedTarget === null) isOver.value = false;
}

function drop(event, take) {
  hold(event);
  isOver.value = false;
  if (hasFiles(event)) take([...event.dataTransfer.files]);
}
