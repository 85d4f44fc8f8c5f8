// The board: every session where its KV is, on the device, the host or the disk, as a button that is as large a part of the
// lane as its KV is of the place. The arrow keys walk on it.
import { useComputed } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { now, second } from "../../lib/clock.js";
import { bytes, counted, nameOf, number, percent, place, seconds, short, waits } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Icon } from "../../shell/icons.js";
import { memory } from "../../state/memory.js";
import { perKey } from "../../state/per_key.js";
import { go, linkTo } from "../../state/route.js";
import { sessionOf } from "../../state/sessions.js";
import { passing } from "../listing.js";
import { bytesIn, leftOf, lookOf, LOOKS, phaseOf, tagsOf, tierName, TIERS } from "../looks.js";
import { corners, drawn, keepPlan, more, placesOf, resize, shown, without } from "./plan.js";

export function Board() {
  const board = useRef(null);
  useEffect(keepPlan, []);
  useEffect(() => keepSize(board.current), []);
  const cellOf = (event) => event.target.closest(".cell");
  const open = (event) => cellOf(event) && go(linkTo(cellOf(event).dataset.id));
  const point = (event) => pointAt(cellOf(event), board.current);
  return html`<div class="board-frame">
    <div
      class="board" ref=${board} tabindex="0" role="group" aria-label="Board of sessions by place" aria-describedby="board-help"
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
  host: "The host keeps none: KV that leaves the device is dropped.",
  disk: "The disk keeps none: the server has no state folder.",
};
const NOTHING = {
  device: "Empty. Open a session and send it a prompt, here or with the API: its KV appears in this lane.",
  host: "Empty. Park a session: its KV comes here, until it is called back.",
  disk: "Empty. KV comes here when its session is gone for long, or the host is full.",
};

const Lanes = () => TIERS.map((tier) => html`<${LaneGround} key=${tier} tier=${tier} />`);

function LaneGround({ tier }) {
  const view = memory.value;
  const use = view?.data[tier];
  const missed = more.value[tier];
  return html`<section class=${`lane ${tier} ${use?.total_bytes === 0 ? "without" : ""}`} aria-label=${tierName[tier]}>
    <header>
      <h2 title=${WHERE[tier]}>${tierName[tier]}</h2>
      ${use?.total_bytes > 0 && html`<${Used} ...${use} />
        <p class="figures"><span>${counted(view.sessions_by_tier[tier], "session")}</span>
          <span title="kept for reuse only, gives way"><i class="key cached"></i>${bytes(use.cached_bytes)} cached</span>
          ${missed > 0 && html`<b title="too small to draw: the table has all">+ ${number(missed)} more</b>`}</p>`}
    </header>
    <div class="field" data-tier=${tier}>
      <p class="dim">${use && !shown.value[tier] && said(tier, use)}</p>
      <i class="cached" style=${{ height: `${(100 * use?.cached_bytes) / use?.total_bytes || 0}%` }}></i>
    </div>
  </section>`;
}

const said = (tier, use) => (use.total_bytes === 0 ? WITHOUT[tier] : use.owned_bytes === 0 ? NOTHING[tier] : null);

const Used = ({ total_bytes: total, owned_bytes: owned }) => html`<p class="used" title="What sessions hold of it. What they share counts once: their cells are smaller then."><b>${bytes(owned)}</b> of ${bytes(total)} <span class="dim">${percent(owned / total)}</span></p>`;

const Cells = () => html`<div class="cells">
  ${drawn.value.map((id) => html`<${Cell} key=${id} id=${id} />`)}
</div>`;

const Legend = () => html`<div class="legend">
  ${["turn", "phase"].map((kind) => html`<span><b>${kind}</b>${LOOKS.filter(({ of }) => of === kind).map(
    ({ key, means }) => html`<span title=${means}><b class="swatch ${key}" aria-hidden="true"><${Icon} name=${key} /></b>${key}</span>`,
  )}</span>`)}
  <span title="the same KV in a second place"><b class="swatch copy" aria-hidden="true"></b>copy</span>
  <${Rest} />
  <span class="hidden" id="board-help">Arrow keys go from session to session, Enter opens one.</span>
</div>`;

/** What the board does not show: the weights on the device, and sessions that have no cell. */
function Rest() {
  const { text } = memory.value ?? {};
  return html`<span class="rest">
    ${text && `Weights: ${bytes(text.kept_bytes + text.ring_bytes)} of the device${text.ring_bytes > 0 ? `, ${bytes(text.ring_bytes)} of it streamed through` : ""}. `}
    ${counted(without.value, "session")} without KV
  </span>`;
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

/** The number at the end of a long name, by which agents of one kind differ: it stays if the name is cut. */
const TAIL = /(?<=.{5})\W?\d{1,3}$/su;
const PARKED = ["io_wait", "idle"];
/** Their KV is on its way to the device, or will be soon. */
const CALLED = ["running", "queued", "ready"];

function Spot({ view, tier, place, isCopy, glides, passes }) {
  const [look, left, name] = [lookOf(view), leftOf(view, now.value), nameOf(view)];
  const [x, y] = corners.value[tier];
  const [tail] = name.match(TAIL) ?? [];
  const isCalled = CALLED.includes(look.key) && !isCopy && (tier !== "device" || view.kv.tier === "to_device");
  const marks = `${isCopy ? "copy" : ""} ${PARKED.includes(look.key) ? "parked" : ""} ${isCalled ? "comes" : ""} ${glides ? "glides" : ""} ${left < 0 ? "late" : ""}`;
  return html`<button
    class="cell ${look.key} ${marks}"
    style=${{
      transform: `translate(${x + place.x}px, ${y + place.y}px)`,
      width: `${place.width}px`,
      height: `${place.height}px`,
      "--full": `${place.full}%`,
    }}
    tabindex="-1" disabled=${!passes} data-id=${view.id} data-tier=${tier}
    aria-label=${sayAll(view, tier, isCopy)}
  >${left === null ? html`<${Icon} name=${look.key} />` : html`<${Ring} view=${view} />`}<span class="head">${tail ? name.slice(0, -tail.length) : name}</span>${tail && html`<span class="tail">${tail}</span>`} <span class="tokens">${short(view.tokens)} tok</span></button>`;
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
    ["Turn", view.state === "idle" ? "none" : `${view.state}: ${lookOf(view).means}`],
    ["Phase", `${view.phase}: ${phaseOf(view).means}`],
    ...(view.returns_at === null ? [] : [["Returns", returnOf(view)]]),
    ["Tokens", counted(view.tokens, "token")],
    ["Place", `${bytes(bytesIn(view, tier))} on the ${tier}${view.kv.tier?.startsWith("to_") ? `, ${place(view.kv)}` : ""}`],
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
    `${nameOf(view)}, ${lookOf(view).of} ${lookOf(view).key}`,
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
