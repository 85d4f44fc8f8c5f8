// Keeps the layout true to the sessions, once a frame at most, and tells each cell where it is.
import { batch, effect, signal, untracked } from "@preact/signals";
import { all, ids, revision, sessionOf } from "../../state/sessions.js";
import { TIERS, bytesOf } from "../looks.js";
import { Layout } from "./layout.js";

/** Ids of the sessions that have cells. */
export const drawn = signal([]);
/** How many cells found no room. */
export const crowded = signal(0);
/** How many sessions hold no KV. */
export const without = signal(0);
/** Whether everything has just been placed anew: then cells jump instead of gliding. */
export const isFresh = signal(true);

const layout = new Layout();
const places = new Map();
let placed = new Map();
let size = { width: 0, height: 0 };
let frame = null;

/** The signal of a session's rectangles by tier: `{device: {x, y, width, height}}`, without the tiers that hold none. */
export function placesOf(id) {
  if (!places.has(id)) places.set(id, signal({}));
  return places.get(id);
}

/** Follow the sessions until the function that this answers is called. */
export function keepPlan() {
  const stop = effect(() => {
    void revision.value;
    frame ??= requestAnimationFrame(update);
  });
  return () => (stop(), cancelAnimationFrame(frame), (frame = null));
}

/** The lanes have another size. */
export function resize(width, height) {
  if (size.width === width && size.height === height) return;
  size = { width, height };
  placed = new Map();
  frame ??= requestAnimationFrame(update);
}

function update() {
  frame = null;
  if (size.width === 0) return;
  untracked(() => batch(() => (placed.size === 0 || !follow(all()) ? arrange(all()) : null)));
}

/** Place what has changed; false if all must be placed anew. */
function follow(views) {
  if (layout.isOutgrown(views, size.width, size.height)) return false;
  for (const id of [...placed.keys()]) if (sessionOf(id).value === null) drop(id);
  let hasRoom = true;
  for (const view of views) {
    if (placed.get(view.id) === view) continue;
    hasRoom = layout.place(view) && hasRoom;
    placed.set(view.id, view);
    publish(view.id);
  }
  if (!hasRoom && crowded.value === 0) return false;
  tell(views, false);
  return true;
}

function arrange(views) {
  layout.arrange(views, size.width, size.height);
  placed = new Map(views.map((view) => [view.id, view]));
  for (const id of [...places.keys()]) if (!placed.has(id)) places.delete(id);
  for (const view of views) publish(view.id);
  tell(views, true);
}

function drop(id) {
  layout.remove(id);
  placed.delete(id);
  places.delete(id);
}

function publish(id) {
  const found = {};
  for (const tier of TIERS) {
    const spot = layout.spot(id, tier);
    if (spot) found[tier] = spot;
  }
  const place = placesOf(id);
  if (JSON.stringify(place.value) !== JSON.stringify(found)) place.value = found;
}

function tell(views, fresh) {
  if (drawn.value !== ids.value) drawn.value = ids.value;
  without.value = views.filter((view) => bytesOf(view) === 0).length;
  crowded.value = layout.crowded.size;
  isFresh.value = fresh;
}
