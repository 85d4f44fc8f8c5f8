// The figures of a session.
import { second } from "../lib/clock.js";
import { ago, bytes, counted, number, place, seconds, waits } from "../lib/format.js";
import { html } from "../lib/html.js";
import { bytesIn, bytesOf, TIERS } from "../sessions/looks.js";

export function Facts({ view }) {
  void second.value; // time goes on
  const { usage, kv } = view;
  return html`
    <section class="panel facts stack" aria-labelledby="facts">
      <h2 id="facts">Facts</h2>
      <${Held} view=${view} />
      <dl>
        <${Fact} name="History">${counted(view.tokens, "token")}<//>
        <${Fact} name="KV">${place(kv)}, ${counted(kv.blocks, "block")}<//>
        <${Fact} name="Residency">${view.residency}<//>
        <${Fact} name="Prompts">${counted(usage.prompt_tokens, "token")}, ${number(usage.cached_tokens)} cached<//>
        <${Fact} name="Generated">${counted(usage.completion_tokens, "token")}<//>
        <${Fact} name="Recomputed">${counted(usage.tokens_recomputed, "token")}<//>
        <${Fact} name="Left the device">${bytes(usage.bytes_out)}<//>
        <${Fact} name="Came back">${bytes(usage.bytes_in)} in ${counted(usage.restores, "restore")}<//>
        <${Fact} name="Last turn waited">${waits(usage.resume_ms)}<//>
        <${Fact} name="Opened">${ago(view.created_at)}<//>
        <${Fact} name="Closes by itself">${closes(view.expires_at)}<//>
        ${view.tenant !== null && html`<${Fact} name="Tenant">${view.tenant}<//>`}
        ${Object.entries(view.metadata).map(([name, value]) => html`<${Fact} key=${name} name=${name}>${value}<//>`)}
        <${Fact} name="Id"><code>${view.id}</code><//>
      </dl>
    </section>
  `;
}

const Fact = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

/** KV by tier, with a bar of its share. */
function Held({ view }) {
  const most = bytesOf(view) || 1;
  return html`<ul class="held" aria-label="KV by tier">${TIERS.map((tier) => {
    const held = bytesIn(view, tier);
    return html`<li key=${tier}><span>${tier}</span>
      <span class="bar" aria-hidden="true"><span class=${`tier-${tier}`} style=${{ width: `${(100 * held) / most}%` }} /></span>
      <span class="number">${bytes(held)}</span></li>`;
  })}</ul>`;
}

function closes(time) {
  if (time === null) return "not during a turn";
  return `in ${seconds(Math.max(0, time - second.value))} without a turn`;
}
