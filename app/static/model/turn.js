// The session's turn: a form to begin one, steps through a paused one, and what it has said.
import { html } from "../lib/html.js";
import { Composer } from "./composer.js";
import { Steps } from "./steps.js";

export function Turn({ desk }) {
  const { running, text, verb } = desk.turn.value;
  const isUnderWay = desk.session.value.state === "paused" || (running && verb === "resume");
  return html`
    <section class="panel turn" aria-labelledby="turn-title">
      <h2 id="turn-title">Turn</h2>
      ${isUnderWay ? html`<${Steps} desk=${desk} />` : html`<${Composer} desk=${desk} />`}
      <p class="said mono" aria-live="polite">
        ${text || html`<span class="dim">What the turn generates appears here.</span>`}
      </p>
    </section>
  `;
}
