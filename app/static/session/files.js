// Sessions as files, out of this server and into it.
import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { download, upload } from "../lib/api.js";
import { html } from "../lib/html.js";
import { useAction } from "../shell/use_action.js";
import { go, linkTo } from "../state/route.js";
import { put } from "../state/sessions.js";

/** Save a session's file where the browser puts downloads; its name, and its size in bytes. */
export async function exportFile(id) {
  const { bytes } = await download(`/v1/sessions/${id}/export`);
  const name = `${id}.safetensors`;
  const address = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // the browser may still read it
  return { name, size: bytes.byteLength };
}

/** Open a session from a file; its view. */
async function importFile(file) {
  const view = await upload("POST", "/v1/sessions/import", file);
  put(view);
  return view;
}

export function Import() {
  const { busy, error, act } = useAction();
  const isOver = useSignal(false);
  const take = async (files) => {
    const { done, value } = await act(async () => importFile(only(files)));
    if (done) go(linkTo(value.id));
  };
  useDroppedFiles(take, isOver);
  return html`
    <label class=${`drop${isOver.value ? " over" : ""}`}>
      ${busy ? "Importing" : "Drop an exported session here, or choose a file"}
      <input type="file" class="hidden" accept=".safetensors" disabled=${busy}
        aria-describedby=${error ? "wrong-import" : null}
        onChange=${(event) => { take([...event.target.files]); event.target.value = ""; }} />
    </label>
    ${error && html`<p class="wrong" id="wrong-import" role="alert">Not imported: ${error.message}</p>`}
  `;
}

function only(files) {
  if (files.length !== 1) throw new Error(`one file at a time, not ${files.length}`);
  return files[0];
}

/** A file may be dropped anywhere on the screen: beside a small target the browser would leave the page for it. */
function useDroppedFiles(take, isOver) {
  useEffect(() => {
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    const over = (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      isOver.value = true;
    };
    const leave = (event) => (isOver.value = event.relatedTarget !== null && isOver.value);
    const drop = (event) => {
      isOver.value = false;
      if (!hasFiles(event)) return;
      event.preventDefault();
      take([...event.dataTransfer.files]);
    };
    const heard = { dragover: over, dragleave: leave, drop };
    for (const [name, listener] of Object.entries(heard)) addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(heard)) removeEventListener(name, listener);
    };
  }, []);
}
