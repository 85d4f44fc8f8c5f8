// A fork with an edit beside the session without it.
import { useState } from "preact/hooks";
import { shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { linkTo } from "../state/route.js";
import { Button } from "./button.js";
import { compare, firstDifference } from "./comparing.js";
import { noVector } from "./edits.js";

export function Compare({ desk }) {
  const [error, setError] = useState(null);
  const [working, setWorking] = useState(false);
  const paused = desk.session.value.state === "paused";
  const unpaused = paused ? null : "Only a paused session can be compared.";
  const why = working ? "Both replies are on their way." : (unpaused ?? noVector(desk.edit.value));
  const run = async () => {
    setError(null);
    setWorking(true);
    await compare(desk).catch(setError);
    setWorking(false);
  };
  return html`
    <section class="panel compare stack" aria-labelledby="compare-title">
      <h2 id="compare-title">Fork and compare</h2>
      <p class="dim">Forks the session here, makes the edit in the fork only, and lets both run to the end.</p>
      <div class="row"><${Button} class="primary" why=${why} onClick=${run}>Fork and compare<//></div>
      ${error && html`<p class="wrong" role="alert">${error.message}</p>`}
      ${desk.sides.value
        ? html`<${Sides} sides=${desk.sides.value} />`
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
    ${error && html`<p class="wrong" role="alert">${error.message}</p>`}
  </article>`;
}
