// The tooltip of the cell under the pointer or the focus.
import { signal } from "@preact/signals";
import { html } from "../../lib/html.js";
import { sessionOf } from "../../state/sessions.js";
import { linesOf } from "./cell.js";

const WIDTH = 340;
/** `{id, tier, x, y, below}`: what is pointed at, and where in the board; null: nothing. */
export const pointed = signal(null);

/** Point at a cell of this board, or at none. */
export function pointAt(cell, board) {
  if (cell === null) return void (pointed.value = null);
  const [own, all] = [cell.getBoundingClientRect(), board.getBoundingClientRect()];
  const x = Math.max(0, Math.min(own.left - all.left, all.width - WIDTH));
  pointed.value = { id: cell.dataset.id, tier: cell.dataset.tier, x, y: own.bottom - all.top + 6 };
}

export function Tip() {
  const at = pointed.value;
  const view = at && sessionOf(at.id).value;
  if (!view) return null;
  return html`<dl class="tip" role="tooltip" style=${{ left: `${at.x}px`, top: `${at.y}px` }}>
    ${linesOf(view, at.tier).map(([title, text]) => html`<dt>${title}</dt><dd>${text}</dd>`)}
  </dl>`;
}
