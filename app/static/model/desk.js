// What the screen knows of one session's inside: its breakpoints, its turn, and what is selected.
import { computed, effect, signal, untracked } from "@preact/signals";
import { connection, server } from "../state/connection.js";
import { happeningsOf, lastOf } from "../state/happenings.js";
import { say } from "../state/notices.js";
import { perSession } from "../state/per_key.js";
import { AFTER } from "../state/points.js";
import { heed, tell } from "../state/route.js";
import { sessionOf } from "../state/sessions.js";
import { turnOf } from "../state/turns.js";
import { refresh } from "./arming.js";
import { FIRST_EDIT } from "./edits.js";
import { makeLensMap, MEASURES } from "./lens_map.js";

/** How long the map waits for another edit of the checkpoint. */
const GATHERED_MS = 100;
const desks = perSession(null);

/** The desk of a session. What it knows stays while other screens are open. */
export function deskOf(id) {
  const held = desks(id);
  if (held.peek() === null) held.value = makeDesk(id);
  return held.peek();
}

/** Bring a panel of the screen into view, by its class. */
export const show = (panel) => document.querySelector(`.model > .${panel}`)?.scrollIntoView();

function makeDesk(id) {
  const session = sessionOf(id);
  return {
    id,
    session,
    turn: turnOf(id),
    /** Null before the first answer. */
    breakpoints: signal(null),
    /** Ends when the last change of them is made: see arming.js. */
    armed: Promise.resolve(),
    /** The id of the capture that the page armed along with a pause, or null. */
    ownWatch: null,
    /** The last pause that the map was brought to. */
    pause: null,
    /** When the session came to the last place. */
    at: 0,
    /** Which pause a click on a layer arms. */
    how: signal({ once: true, pass: "any", point: AFTER }),
    /** The cell that is looked at, `{layer, position}`, or null. */
    cell: signal(null),
    /** The token whose path is drawn, `{tokenId, text, position}`, or null. */
    pinned: signal(null),
    /** What the cells of the map show: `{kind, tokenId, text, beside}`, see `MEASURES` in lens_map.js. */
    measure: signal({ kind: "top", tokenId: null, text: null, beside: null }),
    /** The edit that the form holds, each field as typed: see edits.js. */
    edit: signal(FIRST_EDIT),
    /** What that edit did to the checkpoint, or null: see edits.js. */
    preview: signal(null),
    /** Two replies from one pause, or null: see edit_form.js. */
    comparison: signal(null),
    lens: makeLensMap(id),
    place: computed(() => placeOf(session.value)),
    /** The number of the last news of its breakpoints, or 0. */
    heard: computed(() => lastOf(happeningsOf(id).value, ({ name }) => name === "breakpoints")),
    /** The last news of an edit of its checkpoint, whoever made it, or undefined. */
    edited: computed(() => happeningsOf(id).value.findLast(({ name }) => name === "edit")),
  };
}

/** Follow the session until the function that this answers is called: the server computes for those who look. What was
 * between two looks, or while the server was away, nobody knows. */
export function attend(desk) {
  let seen = null;
  let [shown, later] = [desk.edited.peek(), null];
  const stops = [
    heed((said) => take(desk, said)),
    effect(() => {
      const place = desk.place.value;
      if (connection.value.state !== "live") seen = null;
      else if (place !== null && place !== "busy" && place !== seen) {
        untracked(() => follow(desk, place, seen === null));
        seen = place;
      }
    }),
    effect(() => {
      const { layer, position } = desk.cell.value ?? {};
      tell({ at: desk.cell.value && `${layer},${position}` });
      if (position !== undefined) untracked(() => desk.lens.lookAt(position));
    }),
    effect(() => {
      const asked = desk.measure.value;
      const { kind, tokenId, beside, text } = asked;
      tell({ cells: kind !== "top" && `${kind},${tokenId ?? beside ?? ""},${text ?? ""}` });
      untracked(() => desk.lens.measure(asked));
    }),
    effect(() => void (desk.heard.value && untracked(() => showArmed(desk)))),
    effect(() => {
      const news = desk.edited.value;
      if (news === shown) return;
      shown = news;
      clearTimeout(later); // a slider makes many, and one try two
      later = setTimeout(() => desk.lens.forget(news.data.layer), GATHERED_MS);
    }),
    effect(() => {
      const last = Math.max(desk.session.value?.checkpoint?.created_at ?? 0, lastTurn(desk.id)?.time ?? 0);
      if (!(last > desk.comparison.peek()?.time)) return;
      desk.comparison.value = null; // it belongs to one pause
      tell({ fork: null });
    }),
    () => clearTimeout(later),
    desk.lens.leave,
  ];
  return () => stops.forEach((stop) => stop());
}

/** What a link says that one looked at. */
function take(desk, said) {
  const [layer, position] = (said.get("at") ?? "").split(",").map(Number);
  if (position >= 0 && layer < server.peek().num_layers) desk.cell.value = { layer, position };
  const [kind, of, ...text] = (said.get("cells") ?? "").split(",");
  const { ofToken, ofSession, label } = MEASURES[kind] ?? {};
  if (label) desk.measure.value = { kind, tokenId: ofToken ? Number(of) : null, text: text.join(), beside: ofSession ? of : null };
}

/** The news of the last turn's beginning; undefined if there was none. */
const lastTurn = (id) => happeningsOf(id).value.findLast(({ name, data }) => name === "turn" && data.status === "begun");

/** What tells one place of a session from another: a string that changes as its turn goes on. */
function placeOf(view) {
  if (view === null) return null;
  const { state, tokens, checkpoint, used_at } = view;
  if (state === "queued" || state === "running") return "busy";
  if (checkpoint) return `paused ${checkpoint.created_at} ${checkpoint.layer} ${checkpoint.point} ${checkpoint.first}`;
  return `${state} ${tokens} ${used_at}`;
}

/** At each new place there are other breakpoints (those for once are gone), and more to see. After another
 * turn, or at first, the history may be another, even with the same tokens, by other edits. News of a turn of this page
 * may come after its pause. */
function follow(desk, place, isFirst) {
  const { checkpoint, tokens, used_at } = desk.session.peek();
  const isNext = Math.max(lastTurn(desk.id)?.time ?? 0, desk.turn.peek().began) > desk.at;
  desk.at = checkpoint?.created_at ?? used_at;
  const end = checkpoint ? checkpoint.end : tokens;
  if (desk.preview.peek()?.place !== place) desk.preview.value = null;
  if (desk.cell.peek()?.position >= end) desk.cell.value = null; // the history has been cut
  showArmed(desk);
  const pause = checkpoint ? `${checkpoint.first} ${end}` : desk.pause;
  const calls = pause !== desk.pause || (checkpoint && isNext);
  desk.lens.show(end, server.peek()?.num_layers ?? 0, { isAnew: isFirst || isNext, calls });
  desk.pause = pause;
}

const showArmed = (desk) =>
  refresh(desk).catch((error) => desk.session.peek() !== null && say(`Breakpoints: ${error.message}`, "error", error));
