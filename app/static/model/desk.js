// What the screen knows of one session's inside: its breakpoints, its turn, and what is selected.
import { computed, effect, signal, untracked } from "@preact/signals";
import { call } from "../lib/api.js";
import { server } from "../state/connection.js";
import { say } from "../state/notices.js";
import { forgetWithKey } from "../state/per_key.js";
import { sessionOf } from "../state/sessions.js";
import { turnOf } from "../state/turns.js";
import { FIRST_EDIT } from "./edits.js";
import { makeLensMap } from "./lens_map.js";

let last = null;
forgetWithKey(() => (last = null));

/** The desk of a session. What it knows stays until another session's is asked for, or this one is gone: one of the same
 * id has other signals. */
export function deskOf(id) {
  if (last?.session !== sessionOf(id) || last.turn !== turnOf(id)) last = makeDesk(id);
  return last;
}

function makeDesk(id) {
  const session = sessionOf(id);
  const desk = {
    id,
    session,
    turn: turnOf(id),
    /** Null before the first answer. */
    breakpoints: signal(null),
    /** Ends when the last change of them is made: see arming.js. */
    armed: Promise.resolve(),
    /** The cell that is looked at, `{layer, position}`, or null. */
    cell: signal(null),
    /** The token whose path is drawn, `{tokenId, text, position}`, or null. */
    pinned: signal(null),
    /** The edit that the form holds, each field as typed: see edits.js. */
    edit: signal(FIRST_EDIT),
    /** What that edit did to the checkpoint, `{original, position, before, after}`, or null. */
    preview: signal(null),
    /** The two sides of a comparison: see comparing.js. */
    sides: signal(null),
    lens: makeLensMap(id),
    place: computed(() => placeOf(session.value)),
    refreshBreakpoints: async () => {
      desk.breakpoints.value = (await call("GET", `/v1/sessions/${id}/breakpoints`)).data;
    },
  };
  let seen = null;
  /** Follow the session until the function that this answers is called: the server computes for those who look. */
  desk.attend = () => {
    const stops = [
      effect(() => {
        const place = desk.place.value;
        if (place !== seen) untracked(() => follow(desk, place));
        seen = place;
      }),
      effect(() => {
        const position = desk.cell.value?.position;
        if (position !== undefined) untracked(() => desk.lens.lookAt(position));
      }),
    ];
    return () => stops.forEach((stop) => stop());
  };
  return desk;
}

/** What tells one place of a session from another: a string that changes as its turn goes on. */
function placeOf(view) {
  if (view === null) return null;
  const { state, tokens, checkpoint } = view;
  if (state === "queued" || state === "running") return "busy";
  return checkpoint ? `paused ${checkpoint.created_at} ${checkpoint.layer} ${checkpoint.first}` : `${state} ${tokens}`;
}

/** At each new place there are other breakpoints (those for once are gone), and more to see. */
function follow(desk, place) {
  if (place === null || place === "busy") return;
  const { checkpoint, tokens } = desk.session.peek();
  const end = checkpoint ? checkpoint.end : tokens;
  desk.preview.value = null;
  if (desk.cell.peek()?.position >= end) desk.cell.value = null; // the history has been cut
  desk.refreshBreakpoints().catch((error) => error.status !== 404 && say(`Breakpoints: ${error.message}`, "error"));
  desk.lens.show(end, server.peek()?.num_layers ?? 0);
}
