// The board: every session where its KV is, on the device, the host or the disk. The arrow keys walk on it.
import { useEffect, useRef } from "preact/hooks";
import { bytes, counted } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Icon } from "../../shell/icons.js";
import { memory } from "../../state/memory.js";
import { go, linkTo } from "../../state/route.js";
import { LOOKS, TIERS } from "../looks.js";
import { Cell, pointAt, Tip } from "./cell.js";
import { corners, Lanes } from "./lanes.js";
import { crowded, drawn, keepPlan, resize, without } from "./plan.js";

export function Board() {
  const board = useRef(null);
  useEffect(keepPlan, []);
  useEffect(() => keepSize(board.current), []);
  const cellOf = (event) => event.target.closest(".cell");
  const open = (event) => cellOf(event) && go(linkTo(cellOf(event).dataset.id));
  const point = (event) => pointAt(cellOf(event), board.current);
  return html`<div class="board-frame">
    <div
      class="board" ref=${board} tabindex="0" role="group" aria-label="Board of sessions by tier" aria-describedby="board-help"
      onClick=${open} onKeyDown=${(event) => walk(event, board.current)} onPointerOver=${point} onFocusIn=${point}
      onPointerLeave=${() => pointAt(null)} onFocusOut=${() => pointAt(null)}
    >
      <${Lanes} />
      <${Cells} />
      <${Tip} />
    </div>
    <${Legend} />
  </div>`;
}

const Cells = () => html`<div class="cells">
  ${drawn.value.map((id) => html`<${Cell} key=${id} id=${id} />`)}
</div>`;

function Legend() {
  return html`<div class="legend">
    ${LOOKS.map(
      ({ key, word, means }) => html`<span title=${means}><b class="swatch ${key}" aria-hidden="true"><${Icon} name=${key} /></b>${word}</span>`,
    )}
    <span title="the same KV in a second place"><b class="swatch copy" aria-hidden="true"></b>copy</span>
    <${Rest} />
    <span class="hidden" id="board-help">Arrow keys go from session to session, Enter opens one.</span>
  </div>`;
}

/** What the board does not show: the weights on the device, and sessions that have no cell. */
function Rest() {
  const { counts, text } = memory.value ?? {};
  return html`<span class="rest">
    ${text && `Weights: ${bytes(text.kept_bytes + text.ring_bytes)} of the device${text.ring_bytes > 0 ? `, ${bytes(text.ring_bytes)} of it streamed through` : ""}. `}
    ${counts && "Shared KV is in each cell, and once in a lane's figures; "}${counted(without.value, "session")} without KV
    ${crowded.value > 0 && `, ${counted(crowded.value, "cell")} too many to draw: the table has all`}
  </span>`;
}

/** Keep the plan true to the size of the board. */
function keepSize(board) {
  const measure = () => {
    const fields = TIERS.map((tier) => board.querySelector(`.field[data-tier=${tier}]`));
    const next = Object.fromEntries(fields.map((field) => [field.dataset.tier, [field.offsetLeft, field.offsetTop]]));
    if (JSON.stringify(next) !== JSON.stringify(corners.value)) corners.value = next;
    resize(fields[0].clientWidth, fields[0].clientHeight);
  };
  const observer = new ResizeObserver(measure);
  observer.observe(board);
  return () => observer.disconnect();
}

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Move the focus between the cells of `board`. */
function walk(event, board) {
  const cells = () => [...board.querySelectorAll(".cell:enabled")];
  const next = nextCell(event, board, cells);
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function nextCell(event, board, cells) {
  if (event.ctrlKey || event.altKey || event.metaKey) return null;
  if (event.key === "Home") return cells()[0];
  if (event.key === "End") return cells().at(-1);
  const way = WAYS[event.key];
  if (way === undefined) return null;
  if (event.target === board) return first(cells());
  return nearest(centre(event.target), way, event.target, cells());
}

/** The one at the top left. */
const first = (cells) => cells.map(placed).sort((one, other) => one.y - other.y || one.x - other.x)[0]?.cell;

function nearest(from, [right, down], self, cells) {
  let [best, least] = [null, Infinity];
  for (const cell of cells) {
    if (cell === self) continue;
    const to = centre(cell);
    const ahead = (to.x - from.x) * right + (to.y - from.y) * down;
    if (ahead <= 1) continue;
    const aside = Math.abs((to.x - from.x) * down) + Math.abs((to.y - from.y) * right);
    const distance = ahead + 3 * aside;
    if (distance < least) [best, least] = [cell, distance];
  }
  return best;
}

function centre(cell) {
  const { left, top, width, height } = cell.getBoundingClientRect();
  return { x: left + width / 2, y: top + height / 2 };
}

const placed = (cell) => ({ cell, ...centre(cell) });
