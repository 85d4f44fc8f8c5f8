// A form for an edit at the pause: made, taken back, or armed for what comes.
import { useRef } from "preact/hooks";
import { nameOf, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Armed } from "../session/breakpoints.js";
import { Button, errorElse, Failure, Loading, useAction } from "../shell/controls.js";
import { say } from "../state/notices.js";
import { where } from "../state/points.js";
import { steer } from "./arming.js";
import { EditFields, PARAMS } from "./edit_fields.js";
import { editOf, noVector, tryEdit, undo } from "./edits.js";

export function EditForm({ desk }) {
  const { busy, error, act } = useAction();
  const { checkpoint, state } = desk.session.value;
  const preview = desk.preview.value;
  const unpaused = state === "paused" ? null : "Only a paused session can be edited: choose a layer, and start a turn.";
  const waits = unpaused ?? (busy ? "The last edit is still being made." : null);
  const why = waits ?? noVector(desk.edit.value);
  const unedited = preview ? null : "Nothing is edited here.";
  const tryIt = useTry(desk, act);
  const place = checkpoint && where(checkpoint.point, [checkpoint.layer]);
  const armed = (desk.breakpoints.value ?? []).filter((each) => each.action === "edit");
  const armIt = async () => {
    await steer(desk, checkpoint, editOf(desk.edit.peek(), checkpoint));
    say(`The edit ${place} is armed in session ${nameOf(desk.session.peek())}`);
  };
  return html`
    <section class="panel edit stack" aria-labelledby="edit-title">
      <h2 id="edit-title">Edit ${place ?? "at the pause"}</h2>
      <${EditFields} desk=${desk} error=${error} onChange=${() => preview && tryIt()} />
      <div class="row">
        <${Button} class="primary" why=${why} onClick=${tryIt}>Try it<//>
        <${Button} why=${waits ?? unedited} onClick=${() => act(() => undo(desk))}>Undo<//>
        <${Button} why=${why} onClick=${() => act(armIt)} title="Make this edit in every pass from now on">
          Steer from here on
        <//>
      </div>
      <${Failure} error=${errorElse(error, PARAMS)} />
      <${Armed} desk=${desk} armed=${armed} />
      <${EditPreview} preview=${preview} />
    </section>
  `;
}

/** A function that tries the form's edit. Of those that come while one is tried only the last is tried as well, so that a
 * slider does not lag behind. */
function useTry(desk, act) {
  const again = useRef(false);
  return () => {
    again.current = true;
    act(async () => {
      while (again.current) {
        again.current = false;
        await tryEdit(desk).catch((error) => {
          if (!again.current) throw error;
        });
      }
    });
  };
}

/** What the model would say at the pause, before and after an edit, and what it then says after its last layer. */
function EditPreview({ preview }) {
  if (!preview) return html`<p class="dim empty-preview">Trying makes the edit and shows the lens before and after.</p>`;
  const { op, position, before, after, isMade, ends } = preview;
  return html`
    <div class="sides" role="status">
      ${before ? html`<${Tops} title="Before, position ${position}" top=${before.top} />`
        : html`<p class="dim">A lens reads the residual stream alone: here only what the last layer then says is shown.</p>`}
      ${after && html`<${Tops} title="After, position ${position}" top=${after.top} beside=${before.top} />`}
    </div>
    ${isMade && html`<${Ends} ends=${ends} />`}
    <p class="dim">${!isMade && "What it did is not known. "}The turn goes on with the edit, unless it is undone.
      ${op === "scale" && " A lens normalizes first, so the first two do not show a scale above 0."}</p>
  `;
}

function Ends({ ends }) {
  if (!ends) return html`<${Loading} what="what is said after the last layer" />`;
  const [plain, edited] = ends;
  if (!plain || !edited) return html`<p class="dim">What is said after the last layer could not be had: it takes a fork.</p>`;
  return html`<div class="sides">
    <${Tops} title="Last layer, without the edit" top=${plain.top} />
    <${Tops} title="Last layer, with the edit" top=${edited.top} beside=${plain.top} />
  </div>`;
}

function Tops({ title, top, beside }) {
  return html`<table class="tops-table">
    <caption>${title}</caption>
    <tbody>${top.map((token) => html`<tr key=${token.token_id}>
      <td><code>${visible(token.text)}</code></td>
      <td class="number">${shareOf(token)}</td>
      ${beside && html`<td class="number dim">${changeOf(token, beside)}</td>`}
    </tr>`)}</tbody>
  </table>`;
}

/** Points that are no zero when they are shown. */
const LEAST = 0.05;
const probability = (token) => Math.exp(token.logprob);
const shareOf = (token) => (token.logprob === null ? "not finite" : percent(probability(token)));

/** The change in points of a per cent, or words; "new" where the token was not among the best. */
function changeOf(token, beside) {
  const before = beside.find((each) => each.token_id === token.token_id);
  if (!before || before.logprob === null || token.logprob === null) return "new";
  const points = 100 * (probability(token) - probability(before));
  if (Math.abs(points) < LEAST) return points === 0 ? "no change" : `< ${LEAST} points`;
  return `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)} points`;
}
