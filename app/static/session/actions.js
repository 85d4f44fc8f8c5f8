// What can be done with a session: its phase, forks, files, and its end.
import { useSignal } from "@preact/signals";
import { ApiError, call, open } from "../lib/api.js";
import { bytes, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button, errorElse, Failure, Folded, isAbout, told, useAction, Wrong } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { CloseButton } from "../shell/dialog.js";
import { DropZone, importFile } from "../sessions/open.js";
import { isPast } from "../state/connection.js";
import { say } from "../state/notices.js";
import { go, linkTo } from "../state/route.js";
import { add } from "../state/sessions.js";

export function Actions({ view }) {
  const { busy, error, act } = useAction();
  const exporting = useAction();
  const back = useSignal("");
  const isTurning = view.state === "queued" || view.state === "running";
  const turns = isTurning ? `Its turn is ${view.state}: wait, or cancel it` : null;
  const why = turns ?? (busy ? "One moment" : null);
  const button = (label, run, title) => html`<${Button} why=${why} title=${title} onClick=${() => act(run)}>${label}<//>`;
  return html`
    <section class="panel actions stack" aria-labelledby="actions">
      <h2 id="actions">Actions</h2>
      <${Folded} title="Park, call back, fork, export, import"><div class="row">
        ${button("Park", () => signal(view, "io_wait", back.value), "Phase io_wait: its KV leaves the device")}
        <${ReturnTime} value=${back} error=${error} />
      </div>
      <div class="row">
        ${button("Call back", () => signal(view, "ready"), "Phase ready: its KV comes back to the device")}
        ${button("Mark idle", () => signal(view, "idle", back.value), "Phase idle: gone for long")}
      </div>
      <div class="row">
        ${button("Fork", () => fork(view), "Opens another session with the same history")}
        <${Button} why=${turns ?? (exporting.busy ? "The export is under way" : null)}
          title="Downloads the session as a file, its KV included"
          onClick=${() => exporting.act(() => save(view))}>Export<//>
        <${CloseButton} view=${view} />
      </div>
      <${Failure} error=${errorElse(error, ["resume_in_ms"])} />
      <${Failure} error=${exporting.error} />
      <${Import} />
      <${CopyAs} of=${{
        "the park": () => [phaseOf(view, "io_wait", back.value)], "the call back": () => [phaseOf(view, "ready")],
        "the fork": () => [forkOf(view)], "the export": () => [exportOf(view)],
      }} /><//>
    </section>
  `;
}

const DAY_S = 86_400;

const phaseOf = ({ id }, phase, back = "") =>
  ["POST", `/v1/sessions/${id}/phase`, { body: { phase, resume_in_ms: back.trim() ? 1000 * secondsOf(back) : undefined } }];
const forkOf = ({ id }) => ["POST", `/v1/sessions/${id}/fork`];
const exportOf = ({ id }) => ["GET", `/v1/sessions/${id}/export`, { out: `${id}.safetensors` }];

/** Tell its phase. `back` is a text: seconds until it goes on, or nothing. */
async function signal(view, phase, back) {
  const { moving } = await call(...phaseOf(view, phase, back));
  const moved = moving ? `${bytes(moving.bytes)} of KV go to the ${moving.to}` : "nothing has to move";
  say(`Session ${nameOf(view)} has phase ${phase}: ${moved}`);
}

/** The API counts milliseconds: its refusal would name another range. */
function secondsOf(text) {
  const count = Number(text);
  if (count >= 0 && count <= DAY_S) return count;
  throw new ApiError(0, { message: `back in: a number of seconds from 0 to ${DAY_S}; got ${text}`, param: "resume_in_ms" });
}

async function fork(view) {
  const child = await call(...forkOf(view));
  add(child);
  go(linkTo(child.id));
}

/** Save it as a file where the user says, or where the browser puts downloads. */
async function save(view) {
  const [, path, { out: name }] = exportOf(view);
  const size = await (window.showSaveFilePicker ? saveTo(path, name) : download(path, name));
  say(`Session ${nameOf(view)} is saved as ${name}: ${bytes(size)}`);
}

/** Straight to the disk: a file can be larger than memory. The place is asked for while the click still counts. */
async function saveTo(path, suggestedName) {
  const file = await window.showSaveFilePicker({ suggestedName });
  const { body } = await open(path);
  await body.pipeTo(await file.createWritable());
  return (await file.getFile()).size;
}

const KEPT_MS = 60_000;

/** By way of the page's memory, where a browser cannot do better: a plain link would not send the key. */
async function download(path, name) {
  const file = await (await open(path)).blob();
  const address = URL.createObjectURL(file);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), KEPT_MS); // the browser may still read it
  return file.size;
}

function ReturnTime({ value, error }) {
  const wrong = isAbout(error, "resume_in_ms") ? error.message : null;
  return html`
    <label class="return">back in <input name="resume_in_ms" value=${value.value} size="5" inputmode="decimal" autocomplete="off" placeholder="—"
      ...${told("return", wrong)}
      onInput=${(event) => (value.value = event.target.value)} /> s</label>
    <${Wrong} id="return" error=${wrong} />
  `;
}

function Import() {
  const { busy, error, act } = useAction();
  const take = async (files) => {
    const { done, value } = await act(async () => importFile(only(files)));
    if (done) go(linkTo(value.id));
  };
  return html`
    <label class="drop">
      ${busy ? "Importing" : "Drop an exported session here, or choose a file"}
      <input type="file" class="hidden" accept=".safetensors" disabled=${busy}
        ...${told("import", error)}
        onChange=${(event) => { take([...event.target.files]); event.target.value = ""; }} />
    </label>
    <${Wrong} id="import" error=${error && !isPast(error) && `Not imported: ${error.message}`} />
    <${DropZone} take=${take} />
  `;
}

function only(files) {
  if (files.length !== 1) throw new Error(`one file at a time, not ${files.length}`);
  return files[0];
}
