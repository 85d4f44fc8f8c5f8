// The board: every session where its KV is, on the device, the host or the disk. The arrow keys walk on it.
import { useEffect, useRef } from "preact/hooks";
import { bytes, counted, percent } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Icon } from "../../shell/icons.js";
import { memory } from "../../state/memory.js";
import { go, linkTo } from "../../state/route.js";
import { LOOKS, tierName, TIERS } from "../looks.js";
import { Cell, pointAt, Tip } from "./cell.js";
import { corners, crowded, drawn, keepPlan, resize, without } from "./plan.js";

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

const WHERE = {
  device: "where the model reads KV",
  host: "memory of the machine",
  disk: "files, one for each session",
};
const WITHOUT = {
  host: "No host tier: KV that leaves the device is dropped.",
  disk: "No disk tier: the server has no state folder.",
};
const NOTHING = {
  device: "Empty. Open a session and send it a prompt, here or with the API: its KV appears in this lane.",
  host: "Empty. Park a session: its KV comes here, until it is called back.",
  disk: "Empty. KV comes here when its session is away for long, or the host is full.",
};

const Lanes = () => TIERS.map((tier) => html`<${LaneGround} key=${tier} tier=${tier} />`);

function LaneGround({ tier }) {
  const view = memory.value;
  const use = view?.data[tier];
  return html`<section class=${`lane ${tier} ${use?.total_bytes === 0 ? "without" : ""}`} aria-label=${`${tierName[tier]} tier`}>
    <header>
      <h2 title=${WHERE[tier]}>${tierName[tier]}</h2>
      <span class="dim">${view && use?.total_bytes !== 0 && counted(view.sessions_by_tier[tier], "session")}</span>
      <${Budget} use=${use} tier=${tier} />
      <p class="figures">${use && html`<${Figures} ...${use} />`}</p>
    </header>
    <div class="field" data-tier=${tier}><p class="dim">${use && said(tier, use)}</p></div>
  </section>`;
}

const said = (tier, use) => (use.total_bytes === 0 ? WITHOUT[tier] : use.owned_bytes === 0 ? NOTHING[tier] : null);

function Budget({ use, tier }) {
  const total = use?.total_bytes ?? 0;
  const share = (count) => ({ width: total ? `${(100 * count) / total}%` : "0" });
  const used = total ? percent((use.owned_bytes + use.cached_bytes) / total) : "unknown";
  return html`<div class="budget" role="img" aria-label=${`${tierName[tier]}: ${used} of the budget in use`}>
    <i class="owned" style=${share(use?.owned_bytes ?? 0)}></i><i class="cached" style=${share(use?.cached_bytes ?? 0)}></i>
  </div>`;
}

const Figures = ({ total_bytes: total, owned_bytes: owned, cached_bytes: cached }) => html`
  <span title="held by sessions"><i class="key owned"></i>${bytes(owned)} owned</span>
  <span title="kept for reuse only, gives way"><i class="key cached"></i>${bytes(cached)} cached</span>
  <span title="room for more"><i class="key free"></i>${bytes(Math.max(0, total - owned - cached))} free of ${bytes(total)}</span>
`;

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
