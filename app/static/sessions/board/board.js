// The board: every session where its KV is, on the device, the host or the disk, as a button as large as its bytes there.
// The arrow keys walk on it.
import { useComputed } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { now, second } from "../../lib/clock.js";
import { bytes, counted, nameOf, percent, place, seconds, waits } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Icon } from "../../shell/icons.js";
import { memory } from "../../state/memory.js";
import { perKey } from "../../state/per_key.js";
import { go, linkTo } from "../../state/route.js";
import { sessionOf } from "../../state/sessions.js";
import { passing } from "../listing.js";
import { bytesIn, leftOf, lookOf, LOOKS, tagsOf, tierName, TIERS } from "../looks.js";
import { corners, crowded, drawn, keepPlan, placesOf, resize, without } from "./plan.js";

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
      ({ key, means }) => html`<span title=${means}><b class="swatch ${key}" aria-hidden="true"><${Icon} name=${key} /></b>${key}</span>`,
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

/** Pixels: letters at most, what is beside a name, the least for more than initials, the height of a cell with a name. */
const [SIZE, BESIDE, LEAST_WIDTH, LEAST_HEIGHT] = [12, 25, 40, 12];

const pen = Object.assign(document.createElement("canvas").getContext("2d"), { font: `${SIZE}px system-ui, sans-serif` });
const widths = new Map();
function widthOf(letter) {
  if (!widths.has(letter)) widths.set(letter, pen.measureText(letter).width);
  return widths.get(letter);
}

const letters = new Intl.Segmenter();
const lettersOf = (text) => [...letters.segment(text)].map(({ segment }) => segment);

function within(all, room) {
  const next = all.findIndex((letter) => (room -= widthOf(letter)) < 0);
  return next < 0 ? all : all.slice(0, next);
}

const sizeIn = ({ height }) => Math.min(SIZE, height - 3);

/** As much of a name as its cell has room for, with the end in which agents of one kind differ; a small cell has initials and
 * numbers. */
function fitted(name, { width, height }) {
  const [all, room] = [lettersOf(name), ((width - BESIDE) * SIZE) / sizeIn({ height })];
  if (height < LEAST_HEIGHT) return "";
  if (within(all, room) === all) return name;
  const end = `…${name.match(/(\W\w{1,3}|\d{1,3})$/)?.[0] ?? ""}`;
  if (room > LEAST_WIDTH) return within(all, lettersOf(end).reduce((rest, letter) => rest - widthOf(letter), room)).join("") + end;
  const words = name.match(/[\p{L}\p{N}\p{M}]+/gu) ?? [];
  return within(words[1] ? words.map((word) => (/^\d/.test(word) ? word : lettersOf(word)[0])) : all, room).join("");
}

function Cell({ id }) {
  const passes = useComputed(() => passing.value === null || passing.value.has(id));
  const view = sessionOf(id).value;
  if (view === null) return null;
  const { spots, glides } = placesOf(id).value;
  const held = TIERS.filter((tier) => spots[tier]);
  // The fastest tier's button is the session itself: it glides when KV moves. The others are copies of it.
  return held.map(
    (tier, index) => html`<${Spot}
      key=${index === 0 ? "itself" : tier} view=${view} tier=${tier} place=${spots[tier]} isCopy=${index > 0}
      glides=${glides && index === 0}
      passes=${passes.value}
    />`,
  );
}

function Spot({ view, tier, place, isCopy, glides, passes }) {
  const look = lookOf(view);
  const moves = view.kv.tier?.startsWith("to_") && !isCopy;
  const left = leftOf(view, now.value);
  const [x, y] = corners.value[tier];
  const marks = `${isCopy ? "copy" : ""} ${moves ? "moves" : ""} ${glides ? "glides" : ""} ${left < 0 ? "late" : ""}`;
  return html`<button
    class="cell ${look.key} ${marks}"
    style=${{
      transform: `translate(${x + place.x}px, ${y + place.y}px)`,
      width: `${place.width}px`,
      height: `${place.height}px`,
      "--full": `${Math.round((115 * bytesIn(view, tier)) / place.holds)}%`, // a sliver that is free would be none
      fontSize: `${sizeIn(place)}px`,
    }}
    tabindex="-1" disabled=${!passes} data-id=${view.id} data-tier=${tier}
    aria-label=${sayAll(view, tier, isCopy)}
  >${left === null ? html`<${Icon} name=${look.key} />` : html`<${Ring} view=${view} />`}${` ${fitted(nameOf(view), place)}`}</button>`;
}

/** Seconds: a ring that has longer to go need not be drawn each second. */
const NEAR_S = 60;

/** A ring that empties until the client has said that it is back. */
function Ring({ view }) {
  const far = leftOf(view, now.value) > NEAR_S;
  const left = leftOf(view, (far ? now : second).value);
  const share = Math.max(0, Math.min(1, left / Math.max(1, view.returns_at - view.used_at)));
  return html`<i class="ring" style=${{ "--left": share }} aria-hidden="true"></i>`;
}

function linesOf(view, tier) {
  const copies = TIERS.filter((each) => each !== tier && bytesIn(view, each) > 0);
  return [
    [nameOf(view), view.id],
    ...(view.tenant === null ? [] : [["Tenant", view.tenant]]),
    ...(tagsOf(view).length ? [["Metadata", tagsOf(view).join(", ")]] : []),
    ["Doing", `${lookOf(view).key}: ${lookOf(view).means}`],
    ...(view.returns_at === null ? [] : [["Returns", returnOf(view)]]),
    ["Tokens", counted(view.tokens, "token")],
    ["KV", `${bytes(bytesIn(view, tier))} on the ${tier}${view.kv.tier?.startsWith("to_") ? `, ${place(view.kv)}` : ""}`],
    ...copies.map((each) => ["Copy", `${bytes(bytesIn(view, each))} on the ${each}`]),
    ["Last resume", waits(view.usage.resume_ms)],
  ];
}

function returnOf(view) {
  const left = view.returns_at - now.value;
  return left > 0 ? `in ${seconds(left)}` : `${seconds(-left)} late`;
}

const sayAll = (view, tier, isCopy) =>
  [
    `${nameOf(view)}, ${lookOf(view).key}`,
    `${counted(view.tokens, "token")}, ${isCopy ? "copy of " : ""}${bytes(bytesIn(view, tier))} on the ${tier}`,
    `phase ${view.phase}${view.returns_at === null ? "" : `, returns ${returnOf(view)}`}; session ${view.id}`,
    ...tagsOf(view),
  ].join("; ");

const WIDTH = 340;
/** `{id, tier, x, y}`: what is pointed at, and where in the board; null: nothing. */
const pointed = perKey(null);

function pointAt(cell, board) {
  if (cell === null) return void (pointed.value = null);
  const [own, all] = [cell.getBoundingClientRect(), board.getBoundingClientRect()];
  const x = Math.max(0, Math.min(own.left - all.left, all.width - WIDTH));
  pointed.value = { id: cell.dataset.id, tier: cell.dataset.tier, x, y: own.bottom - all.top + 6 };
}

function Tip() {
  const at = pointed.value;
  const view = at && sessionOf(at.id).value;
  if (!view) return null;
  return html`<dl class="tip" role="tooltip" style=${{ left: `${at.x}px`, top: `${at.y}px` }}>
    ${linesOf(view, at.tier).map(([title, text]) => html`<dt>${title}</dt><dd>${text}</dd>`)}
  </dl>`;
}

function keepSize(board) {
  const measure = () => {
    const fields = TIERS.map((tier) => board.querySelector(`.field[data-tier=${tier}]`));
    const next = Object.fromEntries(fields.map((field) => [field.dataset.tier, [field.offsetLeft, field.offsetTop]]));
    if (JSON.stringify(next) !== JSON.stringify(corners.value)) corners.value = next;
    resize(fields[0].clientWidth, fields[0].clientHeight);
  };
  const observer = new ResizeObserver(measure);
  // A lane without room is narrow: the others are wider once the server has said so, and the board is not.
  for (const each of [board, ...board.querySelectorAll(".field")]) observer.observe(each);
  return () => observer.disconnect();
}

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

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
