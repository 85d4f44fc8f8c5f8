// Saves a session as a file.
import { open } from "../lib/api.js";
import { bytes } from "../lib/format.js";
import { say } from "../state/notices.js";

const KEPT_MS = 60_000;

/** Save it where the user says, or where the browser puts downloads. */
export async function exportSession(id) {
  const name = `${id}.safetensors`;
  const path = `/v1/sessions/${id}/export`;
  const size = await (window.showSaveFilePicker ? saveTo(path, name) : download(path, name));
  say(`${name} has ${bytes(size)}`);
}

/** Straight to the disk: a file can be larger than memory. The place is asked for while the click still counts. */
async function saveTo(path, suggestedName) {
  const file = await window.showSaveFilePicker({ suggestedName });
  const { body } = await open(path);
  await body.pipeTo(await file.createWritable());
  return (await file.getFile()).size;
}

/** By way of the page's memory, where a browser cannot do better: a plain link would not send the key. */
async function download(path, name) {
  const answer = await open(path);
  say(`${name}: the browser keeps ${bytes(Number(answer.headers.get("Content-Length")))} in memory until it is saved`);
  const file = await answer.blob();
  const address = URL.createObjectURL(file);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), KEPT_MS); // the browser may still read it
  return file.size;
}
