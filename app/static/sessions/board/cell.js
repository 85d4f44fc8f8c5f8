// A session on the board: a button in each lane where it has KV, as large as its bytes there, and what its tooltip says.
import { useComputed } from "@preact/signals";
import { now, second } from "../../lib/clock.js";
import { bytes, counted, nameOf, place, seconds, waits } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Icon } from "../../shell/icons.js";
import { perKey } from "../../state/per_key.js";
import { sessionOf } from "../../state/sessions.js";
import { passing } from "../listing.js";
import { bytesIn, leftOf, lookOf, tagsOf, TIERS } from "../looks.js";
import { corners, placesOf } from "./plan.js";

/** Pixels of a letter, of what is beside a name, and the height of a cell that has one. */
const [LETTER, BESIDE, LEAST_HEIGHT] = [6.7, 24, 12];

/** As much of a name as its cell has room for. Agents of one kind differ in its end; a small cell has its initials. */
function fitted(name, { width, height }) {
  const [letters, room] = [[...name], Math.max(0, Math.floor((width - BESIDE) / LETTER))];
  if (height < LEAST_HEIGHT) return "";
  if (letters.length <= room) return name;
  if (room > 6) return [...letters.slice(0, room - 4), "…", ...letters.slice(-3)].join("");
  const words = name.match(/[\p{L}\p{N}]+/gu) ?? [];
  return (words[1] ? words.map((word) => [...word][0]) : letters).slice(0, room).join("");
}

export function Cell({ id }) {
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
      "--full": `${Math.round((100 * bytesIn(view, tier)) / place.holds)}%`,
      fontSize: `${Math.min(12, place.height - 1)}px`,
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

/** What a tooltip shows, as lines of a title and a text. */
function linesOf(view, tier) {
  const copies = TIERS.filter((each) => each !== tier && bytesIn(view, each) > 0);
  return [
    ["Session", view.id],
    ...(view.tenant === null ? [] : [["Tenant", view.tenant]]),
    ...(tagsOf(view).length ? [["Metadata", tagsOf(view).join(", ")]] : []),
    ["Doing", `${lookOf(view).word}: ${lookOf(view).means}`],
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
    `${nameOf(view)}, ${lookOf(view).word}`,
    `${counted(view.tokens, "token")}, ${isCopy ? "copy of " : ""}${bytes(bytesIn(view, tier))} on the ${tier}`,
    `phase ${view.phase}${view.returns_at === null ? "" : `, returns ${returnOf(view)}`}; session ${view.id}`,
    ...tagsOf(view),
  ].join("; ");

const WIDTH = 340;
/** `{id, tier, x, y}`: what is pointed at, and where in the board; null: nothing. */
const pointed = perKey(null);

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
