// Opens sessions from exported files that are dropped anywhere on the screen, or chosen.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { upload } from "../lib/api.js";
import { html } from "../lib/html.js";
import { add } from "../state/sessions.js";

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
  useEffect(() => listen({ dragover: over, dragleave: leave, drop: (event) => drop(event, take) }), []);
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
function leave(event) {
  if (event.relatedTarget === null) isOver.value = false;
}

function drop(event, take) {
  hold(event);
  isOver.value = false;
  if (hasFiles(event)) take([...event.dataTransfer.files]);
}
