// A fork with an edit beside the session without it: both run from the pause to their ends.
import { call } from "../lib/api.js";
import { shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Button, Failure, useAction } from "../shell/controls.js";
import { linkTo } from "../state/route.js";
import { add } from "../state/sessions.js";
import { resume, turnOf } from "../state/turns.js";
import { editOf, noVector, undo } from "./edits.js";

export function Compare({ desk }) {
  const { busy, error, act } = useAction();
  const paused = desk.session.value.state === "paused";
  const unpaused = paused ? null : "Only a paused session can be compared.";
  const why = busy ? "Both replies are on their way." : (unpaused ?? noVector(desk.edit.value));
  return html`
    <section class="panel compare stack" aria-labelledby="compare-title">
      <h2 id="compare-title">Fork and compare</h2>
      <p class="dim">Forks the session here, makes the edit in the fork only, and lets both run to the end.</p>
      <div class="row"><${Button} class="primary" why=${why} onClick=${() => act(() => compare(desk))}>Fork and compare<//></div>
      <${Failure} error=${error} />
      ${desk.comparison.value
        ? html`<${Sides} sides=${desk.comparison.value.sides} />`
        : html`<p class="dim">Both replies appear here, side by side.</p>`}
    </section>
  `;
}

function Sides({ sides }) {
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
  const edits = [editOf(desk.edit.peek(), desk.session.peek().checkpoint ?? {})];
  const before = turnOf(desk.id).peek().text;
  const time = desk.session.peek().checkpoint?.created_at;
  const fork = await call("POST", `/v1/sessions/${desk.id}/fork`);
  try {
    await call("POST", `/v1/sessions/${fork.id}/checkpoint/edit`, { body: { edits } });
  } catch (error) {
    await call("DELETE", `/v1/sessions/${fork.id}`).catch(() => {}); // what was wrong with the edit is told
    throw error;
  }
  add(fork);
  desk.comparison.value = { time, sides: [side(desk.id, "As it is", before), side(fork.id, "With the edit", before)] };
  await Promise.all([run(desk, desk.id), run(desk, fork.id)]);
}

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
