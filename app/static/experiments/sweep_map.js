// One table of a sweep as a heatmap: layers by tokens, or by heads, with how much of the answer each place brings back.
import { useMemo } from "preact/hooks";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { chosen } from "./sweep.js";

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };
/** A place that brings back less has no figure: it would hide those that matter. */
const WORTH = 0.095;
/** Colours of small shares are stronger than those: a third can be seen beside a whole. */
const FAINT = 0.7;

/** `texts` are those of the prompt's tokens. */
export function SweepMap({ table, texts }) {
  const { point, by, layers, columns, rows } = table;
  const here = chosen.value?.point === point ? chosen.value : null;
  const choose = (row, column) => (chosen.value = { point, layer: layers[row], column: columns[column] });
  const onClick = ({ target }) => {
    const cell = target.closest("[data-at]");
    if (cell) choose(...cell.dataset.at.split(" ").map(Number));
  };
  const onKeyDown = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const clip = (value, count) => Math.min(count - 1, Math.max(0, value));
    const [row, column] = here ? [layers.indexOf(here.layer), columns.indexOf(here.column)] : [0, 0];
    choose(clip(row + by[0], layers.length), clip(column + by[1], columns.length));
  };
  return html`<figure class="sweep-map" style=${{ "--columns": columns.length }}>
    <figcaption><b>${point}</b> <span class="dim">by layer and ${by === "head" ? "head" : "token"}</span></figcaption>
    <div class="scroll"><div class="grid" role="grid" tabindex="0" aria-label=${`${point} by layer and ${by}`} aria-rowcount=${layers.length + 1}
      aria-activedescendant=${here && idOf(point, here.layer, here.column)} onClick=${onClick} onKeyDown=${onKeyDown}>
      <div role="row" class="line names"><span role="columnheader" class="dim">layer</span>
        ${columns.map((column) => html`<span key=${column} role="columnheader" title=${by === "head" ? `head ${column}` : `position ${column}`}>
          ${by === "head" ? column : visible(texts[column])}</span>`)}
      </div>
      ${layers.map((layer, at) => html`<${Line} key=${layer} point=${point} layer=${layer} at=${at} columns=${columns} row=${rows[at]}
        chosen=${here?.layer === layer ? here.column : null} />`)}
    </div></div>
  </figure>`;
}

const idOf = (point, layer, column) => `place-${point}-${layer}-${column}`;

/** Drawn again only where something of it is new. */
function Line({ point, layer, at, columns, row, chosen: column }) {
  return useMemo(() => html`<div role="row" class="line" aria-label="layer ${layer}">
    <span role="rowheader" class="dim">${layer}</span>
    ${row.map((place, index) => html`<${Place} key=${index} id=${idOf(point, layer, columns[index])} place=${place} at=${`${at} ${index}`}
      isChosen=${column === columns[index]} />`)}
  </div>`, [row, column, columns]);
}

function Place({ id, place, at, isChosen }) {
  const share = place?.normalized ?? null;
  const name = place === null ? "waits" : share === null ? "not known" : "";
  const side = share === null ? name : share < 0 ? "less" : "more";
  return html`<span id=${id} role="gridcell" data-at=${at} class="place ${side.replace(" ", "-")} ${isChosen ? "chosen" : ""}" aria-selected=${isChosen}
    aria-label=${name || shareOf(share)} style=${{ "--p": `${Math.round(100 * Math.min(1, Math.abs(share ?? 0)) ** FAINT)}%` }}
  >${share !== null && Math.abs(share) >= WORTH ? Math.round(100 * share) : ""}</span>`;
}

/** 0.61 is "61 %"; below zero it leads away from the answer. */
export const shareOf = (share) => `${share < 0 ? "−" : ""}${Math.abs(100 * share).toFixed(Math.abs(share) < 0.1 ? 1 : 0)} %`;
