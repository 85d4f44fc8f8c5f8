// What the last turns waited for before their first token: stacked bars on one scale.
import { counted, milliseconds } from "../lib/format.js";
import { html } from "../lib/html.js";

const PARTS = ["queue", "restore", "prefill"];
const SHOWN = 8;

/** `turns` are those of `lanesOf`, `usage` the session's: it knows the last turn, if that was before the page opened. */
export function Waits({ turns, usage }) {
  const known = turns.filter((turn) => turn.waits !== null).slice(-SHOWN).reverse();
  if (turns.length === 0 && usage.last_turn !== null) {
    known.push({ from: null, waits: usage.resume_ms, usage: usage.last_turn });
  }
  const longest = Math.max(1e-9, ...known.map(total));
  return html`
    <div class="waits stack">
      <h3>What turns waited for</h3>
      <ul class="legend">${PARTS.map((part) => html`<li key=${part}><span class=${`swatch ${part}`} aria-hidden="true" />${MEANS[part]}</li>`)}</ul>
      ${known.length === 0 && html`<p class="dim">The next turn's waits appear here: the queue, KV that came back, the prefill.</p>`}
      <ol>${known.map((turn) => html`<${Bar} key=${turn.from} turn=${turn} longest=${longest} />`)}</ol>
    </div>
  `;
}

const MEANS = { queue: "queue", restore: "restore of KV", prefill: "prefill" };

const total = ({ waits }) => waits.queue + waits.restore + waits.prefill;

function Bar({ turn, longest }) {
  const { waits, usage } = turn;
  const said = PARTS.map((part) => `${MEANS[part]} ${milliseconds(waits[part])}`).join(", ");
  return html`
    <li>
      <span class="clock">${turn.from === null ? "before" : clock(turn.from)}</span>
      <span class="bar" role="img" aria-label=${said} title=${said}>
        ${PARTS.map((part) => html`<span key=${part} class=${part} style=${{ width: `${(100 * waits[part]) / longest}%` }} />`)}
      </span>
      <span class="number">${milliseconds(total(turn))}</span>
      <span class="parts dim">${said}${usage && ` · ${counted(usage.completion_tokens, "token")} generated`}</span>
    </li>
  `;
}

/** A time of day, to the second. */
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
