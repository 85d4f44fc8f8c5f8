// A form for an edit at the pause: made, taken back, or armed for what comes; and a fork with the edit beside the session without it.
import { useEffect, useRef } from "preact/hooks";
import { call, need } from "../lib/api.js";
import { serverTime } from "../lib/clock.js";
import { nameOf, percent, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Armed } from "../session/breakpoints.js";
import { Button, errorElse, errorOf, Failure, Field, Folded, Loading, useAction } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { attempt, say } from "../state/notices.js";
import { partOf, pointIn, where } from "../state/points.js";
import { heed, isInside, linkTo, tell } from "../state/route.js";
import { add } from "../state/sessions.js";
import { resume, turnOf } from "../state/turns.js";
import { arm, steering } from "./arming.js";
import { editing, editOf, noVector, OPS, tryEdit, undo } from "./edits.js";
import { isVector, VectorOptions } from "./vectors.js";

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
  const edits = (desk.breakpoints.value ?? []).filter((each) => each.action === "edit");
  const armed = () => steering(desk, checkpoint ?? {}, editNow(desk));
  const armIt = async () => {
    await arm(desk, armed());
    say(`The edit ${place} is armed in session ${nameOf(desk.session.peek())}`);
  };
  return html`
    <section class="panel edit stack" aria-labelledby="edit-title">
      <h2 id="edit-title">Edit ${place ?? "at the pause"}</h2>
      <${Folded} title="What it does" open=${Boolean(error)}><${EditFields} desk=${desk} error=${error} onChange=${() => preview && tryIt()} /><//>
      <div class="row">
        <${Button} class="primary" why=${why} onClick=${tryIt}>Try it<//>
        <${Button} why=${waits ?? unedited} onClick=${() => act(() => undo(desk))}>Undo<//>
        <${Button} why=${why} onClick=${() => act(armIt)} title="Make this edit in every pass from now on">
          Steer from here on
        <//>
        <${CopyAs} of=${{ "the edit": () => [editing(`/v1/sessions/${desk.id}`, editNow(desk))], "the edit, from here on": () => [armed()] }} />
      </div>
      <${Failure} error=${errorElse(error, PARAMS)} />
      <${Armed} desk=${desk} armed=${edits} />
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

const PARAMS = ["op", "factor", "vector", "positions", "max_norm", "heads", "neurons", "experts"];

/** `onChange` is told when a field has a new value that one has settled on. */
function EditFields({ desk, error, onChange }) {
  const form = desk.edit.value;
  const { takes, does, slider } = OPS[form.op];
  const put = (changed) => (desk.edit.value = { ...desk.edit.peek(), ...changed });
  const set = (event) => put({ [event.target.name]: event.target.value });
  const settle = (event) => {
    set(event);
    onChange();
  };
  const choose = (event) => {
    const op = event.target.value;
    put({ op, factor: OPS[op].first ?? "" });
  };
  const told = (param) => errorOf(error, param);
  const checkpoint = desk.session.value.checkpoint;
  const part = checkpoint && partOf(pointIn(checkpoint.layer, checkpoint.point));
  return html`
    <div class="fields">
      <${Field} id="op" label="Operation" error=${told("op")} control=${(tied) => html`
        <select ...${tied} value=${form.op} onChange=${choose}>
          ${Object.keys(OPS).map((op) => html`<option key=${op} value=${op}>${op.replace("_", " ")}</option>`)}
        </select>`}><span class="dim mono">h → ${does}</span><//>
      <${Factor} used=${takes.includes("factor")} slider=${slider ?? [0, 2, 0.05]} value=${form.factor}
        error=${told("factor")} set=${set} settle=${settle} />
      <${Field} id="vector" label="Vector" error=${told("vector")} control=${(tied) => html`
        <select ...${tied} value=${isVector(form.vector) ? form.vector : ""} onChange=${settle} disabled=${!takes.includes("vector")}>
          <${VectorOptions} none="none" />
        </select>`} />
      ${part && html`<${Field} id="part" label="Only ${part}" error=${told(part)} control=${(tied) => html`
        <input ...${tied} placeholder="all, or 0, 3" value=${form.part} onInput=${set} onChange=${settle} />`} />`}
      <${WhereTo} form=${form} error=${told("positions")} set=${set} settle=${settle} />
      <${Field} id="max_norm" label="Longest change (L2)" error=${told("max_norm")} control=${(tied) => html`
        <input ...${tied} inputmode="decimal" placeholder="no limit" value=${form.max_norm}
          onInput=${set} onChange=${settle} />`} />
    </div>
  `;
}

function Factor({ used, slider: [min, max, step], value, error, set, settle }) {
  return html`<${Field} wide id="factor" label="Factor" error=${error} control=${(tied) => html`
    <span class="row tight">
      <input type="range" name="factor" aria-label="Factor, slider" min=${min} max=${max} step=${step} value=${value}
        disabled=${!used} onInput=${set} onChange=${settle} />
      <input ...${tied} inputmode="decimal" value=${value} disabled=${!used} onInput=${set} onChange=${settle} />
    </span>`} />`;
}

function WhereTo({ form, error, set, settle }) {
  const end = (name, label) => html`<input inputmode="numeric" name=${name} aria-label=${label} placeholder=${name}
    value=${form[name]} onInput=${set} onChange=${settle} disabled=${form.positions !== "range"} />`;
  return html`<${Field} wide id="positions" label="Positions" error=${error} control=${(tied) => html`
    <span class="row tight">
      <select ...${tied} value=${form.positions} onChange=${settle}>
        <option value="last">the last</option><option value="all">all</option><option value="range">a range</option>
      </select>
      ${end("first", "First position")} ${end("end", "End of the positions, not included")}
    </span>`} />`;
}

export function Compare({ desk }) {
  const { busy, error, act } = useAction();
  const paused = desk.session.value.state === "paused";
  useEffect(() => heed((said) => {
    const [fork, from] = (said.get("fork") ?? "").split(",");
    if (fork && !desk.comparison.peek()) attempt("Compare", () => recall(desk, fork, Number(from)));
  }), []);
  const unpaused = paused ? null : "Only a paused session can be compared.";
  const why = busy ? "Both replies are on their way." : (unpaused ?? noVector(desk.edit.value));
  return html`
    <section class="panel compare stack" aria-labelledby="compare-title">
      <h2 id="compare-title">Fork and compare</h2>
      <p class="dim">Forks the session here, makes the edit in the fork only, and lets both run to the end.</p>
      <div class="row"><${Button} class="primary" why=${why} onClick=${() => act(() => compare(desk))}>Fork and compare<//>
        <${CopyAs} of=${{ "the comparison": () => callsOf(desk) }} /></div>
      <${Failure} error=${error} />
      ${desk.comparison.value
        ? html`<${Replies} sides=${desk.comparison.value.sides} />`
        : html`<p class="dim">Both replies appear here, side by side.</p>`}
    </section>
  `;
}

function Replies({ sides }) {
  const [mine, theirs] = sides;
  const marks = [firstDifference(mine.parts, theirs.parts), firstDifference(theirs.parts, mine.parts)];
  const over = sides.every((each) => each.done);
  const same = marks.every((at) => at < 0);
  const outcome = same ? "Both replies are the same." : "The first token that differs is marked.";
  return html`
    <div class="sides">
      ${sides.map((each, at) => html`<${Reply} key=${each.id} side=${each} mark=${over ? marks[at] : -1} />`)}
    </div>
    <p role="status">${over ? outcome : "Both run."}</p>
  `;
}

function Reply({ side: { id, name, before, parts, error }, mark }) {
  const shown = (part, at) => (at === mark ? html`<mark>${visible(part.text)}</mark>` : part.text);
  return html`<article>
    <h3>${name} <a href=${linkTo(id)} class="mono">${shortId(id)}</a></h3>
    <p class="reply mono"><span class="dim">${before}</span>${parts.map(shown)}</p>
    <${Failure} error=${error} />
  </article>`;
}

/** Fill `desk.comparison` with `{time, sides}`: when the pause began, and `{id, name, parts, done, error}` for the session
 * as it is and for its edited fork. Each part is `{text, ids}`. Throws if there is no fork, or no such edit; then there
 * is no fork either. */
async function compare(desk) {
  if (desk.preview.peek()) await undo(desk);
  const edit = editNow(desk);
  const before = turnOf(desk.id).peek().text;
  const { created_at: time, end } = desk.session.peek().checkpoint;
  const fork = await call(...forking(desk));
  try {
    await call(...editing(`/v1/sessions/${fork.id}`, edit));
  } catch (error) {
    await call("DELETE", `/v1/sessions/${fork.id}`).catch(() => {}); // what was wrong with the edit is told
    throw error;
  }
  add(fork);
  desk.comparison.value = { time, sides: [side(desk.id, "As it is", before), side(fork.id, "With the edit", before)] };
  if (isInside(desk.id)) tell({ fork: `${fork.id},${end}` });
  await Promise.all([run(desk, desk.id), run(desk, fork.id)]);
}

/** What both sessions said from a position on, by a link to a comparison that is over. */
async function recall(desk, fork, from) {
  const sides = await Promise.all([[desk.id, "As it is"], [fork, "With the edit"]].map(async ([id, name]) => {
    const { token_ids, pieces } = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } });
    const parts = pieces.slice(from).map((text, at) => ({ text, ids: [token_ids[from + at]] }));
    return { ...side(id, name, ""), parts, done: true };
  }));
  desk.comparison.value ??= { time: serverTime(), sides };
}

/** The form's edit at the pause. */
function editNow(desk) {
  const { checkpoint } = desk.session.peek();
  need(checkpoint, { message: "there is no pause: choose a layer, and start a turn" });
  const message = noVector(desk.edit.peek());
  need(!message, { param: "vector", message });
  return editOf(desk.edit.peek(), checkpoint);
}

const forking = ({ id }) => ["POST", `/v1/sessions/${id}/fork`];

/** What comparing sends. */
const callsOf = (desk) => [
  forking(desk), editing("/v1/sessions/ID", editNow(desk)),
  ...["ID", desk.id].map((id) => ["POST", `/v1/sessions/${id}/resume`, { body: { until: "end" } }]),
];

const side = (id, name, before) => ({ id, name, before, parts: [], done: false, error: null });

function change(desk, id, changed) {
  const known = desk.comparison.peek(); // null where another turn has begun since
  const sides = known?.sides.map((each) => (each.id === id ? { ...each, ...changed(each) } : each));
  desk.comparison.value = known && { ...known, sides };
}

async function run(desk, id) {
  await resume(id, "end", (part) => change(desk, id, ({ parts }) => ({ parts: [...parts, part] })));
  change(desk, id, () => ({ done: true, error: turnOf(id).peek().error }));
}

/** Index of the first part in which the tokens of `parts` are not those of `others`; -1 if there is none. */
function firstDifference(parts, others) {
  const mine = parts.flatMap(({ ids }) => ids);
  const theirs = others.flatMap(({ ids }) => ids);
  const differs = mine.findIndex((tokenId, at) => tokenId !== theirs[at]);
  let count = 0;
  return differs < 0 ? -1 : parts.findIndex(({ ids }) => (count += ids.length) > differs);
}
