// Sessions as files, out of this server and into it.
import { download, upload } from "../lib/api.js";
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
export async function importFile(file) {
  const view = await upload("POST", "/v1/sessions/import", file);
  put(view);
  return view;
}
