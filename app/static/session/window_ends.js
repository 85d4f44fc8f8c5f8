// What stands at the ends of a window of tokens: the way to those that are not drawn.
import { number } from "../lib/format.js";
import { html } from "../lib/html.js";

export const Earlier = ({ first, size, show }) => html`
  <p class="beyond">
    <button onClick=${() => show(Math.max(0, first - size / 2))}>Earlier tokens</button>
    <button onClick=${() => show(0)}>From the first</button>
    <span class="dim">${number(first)} before these</span>
  </p>
`;

export const Later = ({ end, length, size, show }) => html`
  <p class="beyond">
    <button onClick=${() => show(end - size / 2)}>Later tokens</button>
    <button onClick=${() => show(length)}>To the last</button>
    <span class="dim">${number(length - end)} after these</span>
  </p>
`;
