// Draws lanes over time: where the KV was, the state, the phase, and the turns with what they waited for.
import { bytes, milliseconds, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { bytesThere, place } from "./events.js";
import { clock } from "./waits.js";

const TICKS = 4;

/** `lanes` are those of `lanesOf`; the drawing goes from `start` to `now`, Unix seconds. The table says the same in words. */
export function Lanes({ lanes, start, now }) {
  const scale = (time) => (100 * (Math.min(Math.max(time, start), now) - start)) / (now - start);
  const seen = (span) => (span.to ?? now) > start;
  return html`
    <div class="lanes" role="img" aria-label=${`Lanes of state, phase, KV and turns from ${clock(start)} to ${clock(now)}; the table below says the same`}>
      <${Lane} label="KV">${lanes.tier.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
        name=${`tier-${span.value}`} said=${tierText(span)} />`)}<//>
      <${Lane} label="Phase">${lanes.phase.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
        name=${`phase-${span.value}`} said=${span.value} />`)}<//>
      <${Lane} label="State">
        ${lanes.state.filter(seen).map((span) => html`<${Span} key=${span.from} span=${span} scale=${scale}
          name=${`state-${span.value}`} said=${span.value} />`)}
        ${lanes.pauses.filter(({ time }) => time > start).map(({ time, layer }) => html`<i key=${time} class="pause"
          style=${{ left: `${scale(time)}%` }} title=${`paused after layer ${layer}`} />`)}
      <//>
      <${Lane} label="Turns">${lanes.turns.filter(seen).map((turn) => html`<${Turn} key=${turn.from} turn=${turn} scale=${scale} now=${now} />`)}<//>
      <${Axis} start=${start} now=${now} />
    </div>
  `;
}

const Lane = ({ label, children }) => html`<div class="lane"><span class="name">${label}</span><div class="track">${children}</div></div>`;

const at = (scale, from, to) => ({ left: `${scale(from)}%`, width: `${Math.max(0, scale(to) - scale(from))}%` });

const Span = ({ span, scale, name, said }) => html`
  <span class=${`span ${name}`} style=${at(scale, span.from, span.to)} title=${`${said}: ${seconds(span.to - span.from)}`}>${said}</span>
`;

/** A turn: its waits in front, then what it generated. */
function Turn({ turn, scale, now }) {
  const to = turn.to ?? now;
  const parts = [];
  let from = turn.from;
  for (const [part, duration] of Object.entries(turn.waits ?? {})) {
    const end = Math.min(from + duration / 1000, to);
    if (end > from) parts.push({ part, from, end, said: `${part} ${milliseconds(duration)}` });
    from = end;
  }
  if (to > from) parts.push({ part: "decode", from, end: to, said: turn.to === null ? "running" : `${turn.reason} after ${seconds(to - turn.from)}` });
  return parts.map(({ part, from, end, said }) => html`<span key=${part} class=${`span ${part}`} style=${at(scale, from, end)} title=${said}>${said}</span>`);
}

const tierText = ({ value, kv }) =>
  value === "none" ? "no KV" : `${place({ tier: value })} ${bytes(bytesThere(kv))}`;

function Axis({ start, now }) {
  const times = Array.from({ length: TICKS + 1 }, (_, index) => start + ((now - start) * index) / TICKS);
  return html`<div class="lane axis"><span class="name" /><div class="track">
    ${times.map((time, index) => html`<span key=${index} class="tick" style=${{ left: `${(100 * index) / TICKS}%` }}>${clock(time)}</span>`)}
  </div></div>`;
}
