// The lens as a heatmap, layers by tokens: the token that the model would say, with its probability as the colour; or what is
// measured there. From an outlined cell upward the last answer is the likeliest.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { percent, short } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { server } from "../state/connection.js";
import { leadOf } from "./lens_map.js";

const MOVES = {
  ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
  PageUp: [0, -16], PageDown: [0, 16], Home: [0, -Infinity], End: [0, Infinity],
};

export function Heatmap({ desk, window }) {
  void desk.lens.version.value;
  const { first, end, width } = window;
  const { kind } = desk.measure.value;
  const total = desk.lens.end.value;
  const layers = Array.from({ length: server.value.num_layers }, (_, layer) => layer);
  const positions = Array.from({ length: Math.max(0, end - first) }, (_, at) => first + at);
  if (total === 0) return html`<${Nothing} />`;
  const cell = desk.cell.value;
  const shown = { paddingLeft: `${first * width}px`, width: `${total * width}px` };
  const columns = positions.map((position) => desk.lens.column(position));
  const leads = columns.map(leadOf).map((lead) => (lead && lead.layer < lead.last ? lead.layer : null)); // the last layer always leads
  return html`
    <div class="heat" role="grid" tabindex="0" aria-label="The lens: layers by positions" style=${{ "--cell": `${width}px` }}
      aria-rowcount=${layers.length + 1} aria-colcount=${total}
      aria-activedescendant=${cell && cell.position >= first && cell.position < end ? idOf(cell) : null}
      onKeyDown=${(event) => move(event, desk)} onFocus=${() => desk.cell.value ??= lastOf(desk)}
      onClick=${(event) => choose(event, desk)}>
      <div class="heads" role="row" style=${shown}>
        ${positions.map((each, at) => html`<${Head} key=${each} position=${each} column=${columns[at]} />`)}
      </div>
      ${layers.map((layer) => html`
        <div key=${layer} class="cells" role="row" aria-label="layer ${layer}" style=${shown}>
          ${positions.map((position, at) => drawn(layer, position, columns[at], kind, leads[at] === layer))}
        </div>`)}
      ${cell && cell.position < total && html`<div class="chosen" aria-hidden="true" style=${{
        left: `${cell.position * width}px`, top: `${HEAD_HEIGHT + cell.layer * CELL_HEIGHT}px` }} />`}
    </div>
  `;
}

const Nothing = () => html`
  <p class="nothing dim">
    Choose a layer to pause after it, then start a turn. At the pause this place shows what the model would say after
    each layer at each token.
  </p>
`;

const Head = ({ position, column }) => html`<div class="head" role="columnheader" aria-colindex=${position + 1}>
  <b>${column?.tokenId == null ? "" : visible(column.text)}</b><span>${position}</span>
</div>`;

const nats = (value) => value.toFixed(value < 10 ? 2 : 1);

/** How each measure is written in a cell, and how strong its colour is, from 0 to 1. */
const SHOWN = {
  p: { text: percent, strength: (p) => p },
  rank: { text: short, strength: (rank) => 1 - Math.log(rank) / Math.log(20_000) },
  entropy: { text: (value) => value.toFixed(1), strength: (value) => 1 - value / 10 },
  kl: { text: nats, strength: (gap) => Math.exp(-gap / 2) },
  beside: { text: nats, strength: (gap) => 1 - Math.exp(-gap / 2) },
};
/** Tokens that say little: beside them the others stand out. */
const QUIET = /^[\s\p{P}\p{S}]*$/u;
const QUIET_STRENGTH = 0.3;

function drawn(layer, position, column, kind, leads) {
  const best = column?.rows.get(layer)?.[0];
  const value = column?.values.get(layer);
  const name = { key: position, id: idOf({ layer, position }), role: "gridcell", "aria-colindex": position + 1 };
  if (kind === "top" ? !best : value === undefined) return html`<div ...${name} class="cell bare" />`;
  const isQuiet = kind === "top" && QUIET.test(best.text);
  const strength = kind === "top" ? best.p * (isQuiet ? QUIET_STRENGTH : 1) : SHOWN[kind].strength(value);
  return html`<div ...${name} class=${`cell${isQuiet ? " quiet" : ""}${leads ? " leads" : ""}`}
    style=${{ "--p": `${100 * Math.min(1, Math.max(0, strength))}%` }}>${kind === "top" ? visible(best.text) : SHOWN[kind].text(value)}</div>`;
}

const idOf = ({ layer, position }) => `cell-${layer}-${position}`;
const lastOf = (desk) => ({
  layer: desk.session.peek().checkpoint?.layer ?? server.peek().num_layers - 1,
  position: desk.lens.end.peek() - 1,
});

function choose(event, desk) {
  const [kind, layer, position] = (event.target.closest('[role="gridcell"]')?.id ?? "").split("-");
  if (kind === "cell") desk.cell.value = { layer: Number(layer), position: Number(position) };
}

/** Where a key leads from a row and a column of so many; undefined for other keys. */
export function moved(event, from, counts) {
  const by = MOVES[event.key];
  if (by) event.preventDefault();
  return by?.map((steps, axis) => Math.min(counts[axis] - 1, Math.max(0, from[axis] + steps)));
}

function move(event, desk) {
  const { layer, position } = desk.cell.value ?? lastOf(desk);
  const to = moved(event, [layer, position], [server.peek().num_layers, desk.lens.end.peek()]);
  if (!to) return;
  desk.cell.value = { layer: to[0], position: to[1] };
  const { currentTarget: map } = event;
  requestAnimationFrame(() => map.querySelector(".chosen").scrollIntoView({ block: "nearest", inline: "nearest" }));
}

/** Sizes in CSS pixels, as in model.css. Cells of a short history are wider. */
const [LEAST_WIDTH, MOST_WIDTH] = [66, 132];
const LADDER_WIDTH = 136;
const CELL_HEIGHT = 22;
const HEAD_HEIGHT = 40;
/** Cells are drawn in steps of so many positions, so that most scrolling draws nothing. */
const STEP = 16;

/** `{box, onScroll, first, end, width}`: a ref and a listener for the box that scrolls, the positions to draw, and how wide. The
 * box stays at its right end as the history grows, unless one has scrolled away. A pause at other tokens brings it there. */
export function useWindow(desk) {
  const box = useRef(null);
  const atEnd = useRef(true);
  const called = useRef(0);
  const total = desk.lens.end.value;
  const calls = desk.lens.calls.value;
  const [range, setRange] = useState({ first: 0, end: 0, width: LEAST_WIDTH });
  const measure = () => {
    if (box.current === null) return; // news of a box whose screen has just closed
    const { scrollLeft, clientWidth, scrollWidth } = box.current;
    const width = Math.min(MOST_WIDTH, Math.max(LEAST_WIDTH, Math.floor((clientWidth - LADDER_WIDTH) / Math.max(1, total))));
    atEnd.current = scrollLeft + clientWidth >= scrollWidth - width;
    const first = Math.max(0, STEP * Math.floor(scrollLeft / width / STEP - 0.5));
    const end = Math.min(total, STEP * Math.ceil((scrollLeft + clientWidth) / width / STEP + 0.5));
    setRange((before) => (before.first === first && before.end === end && before.width === width ? before : { first, end, width }));
  };
  useLayoutEffect(() => {
    if (atEnd.current || called.current !== calls) box.current.scrollLeft = box.current.scrollWidth;
    called.current = calls;
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, [total, calls]);
  useEffect(() => {
    if (range.end > range.first) desk.lens.want(Math.max(0, Math.min(range.first, total - 64)), range.end);
  }, [range, total]);
  return { box, onScroll: measure, first: range.first, end: Math.min(range.end, total), width: range.width };
}
