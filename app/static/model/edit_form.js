// A form for an edit at the pause: tried, taken back, or armed for the tokens to come.
import { useRef, useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { say } from "../state/notices.js";
import { arm } from "./arming.js";
import { Button } from "./button.js";
import { EditFields, PARAMS } from "./edit_fields.js";
import { EditPreview } from "./edit_preview.js";
import { editOf, noVector, tryEdit, undo } from "./edits.js";
import { errorElse } from "./field.js";

export function EditForm({ desk }) {
  const { run, working, error } = useActions();
  const { checkpoint, state } = desk.session.value;
  const preview = desk.preview.value;
  const unpaused = state === "paused" ? null : "Only a paused session can be edited: choose a layer, and start a turn.";
  const why = unpaused ?? (working ? "The last edit is still being made." : null) ?? noVector(desk.edit.value);
  const unedited = preview ? null : "Nothing is edited here.";
  const layer = checkpoint?.layer;
  const steer = async () => {
    await arm(desk, { layer, action: "edit", edits: [editOf(desk.edit.peek())] });
    await desk.refreshBreakpoints();
    say(`The edit is armed after layer ${layer}.`);
  };
  return html`
    <section class="panel edit stack" aria-labelledby="edit-title">
      <h2 id="edit-title">Edit ${layer === undefined ? "at the pause" : `after layer ${layer}`}</h2>
      <${EditFields} desk=${desk} error=${error} onChange=${() => preview && run(() => tryEdit(desk))} />
      <div class="row">
        <${Button} class="primary" why=${why} onClick=${() => run(() => tryEdit(desk))}>Preview<//>
        <${Button} why=${unpaused ?? unedited} onClick=${() => run(() => undo(desk))}>Undo<//>
        <${Button} why=${why} onClick=${() => run(steer)} title="Make this edit in every pass from now on">
          Steer from here on
        <//>
      </div>
      ${errorElse(error, PARAMS) && html`<p class="wrong" role="alert">${error.message}</p>`}
      <${EditPreview} preview=${preview} />
    </section>
  `;
}

/** `run` does one action after the other. Of those that come while one is under way only the last is done, so that a
 * slider does not lag behind. */
function useActions() {
  const [error, setError] = useState(null);
  const [working, setWorking] = useState(false);
  const queue = useRef({ busy: false, next: null });
  const run = async (action) => {
    queue.current.next = action;
    if (queue.current.busy) return;
    queue.current.busy = true;
    setWorking(true);
    while (queue.current.next) {
      const next = queue.current.next;
      queue.current.next = null;
      setError(null);
      await next().catch(setError);
    }
    queue.current.busy = false;
    setWorking(false);
  };
  return { run, working, error };
}
