// Keeps the layout true to the sessions, once a frame at most, and tells each cell where it is.
import { batch, effect, signal, untracked } from "@preact/signals";
import { perSession } from "../../state/per_key.js";
import { all, ids, revision, sessionOf } from "../../state/sessions.js";
import { TIERS, bytesOf } from "../looks.js";
import { Layout } from "./layout.js";

/** Ids of the sessions that have cells. */
export const drawn = signal([]);
/** Pixels from the corner of the board to the corner of each lane's field: `[x, y]`. */
export const corners = signal({ device: [0, 0], host: [0, 0], disk: [0, 0] });
/** How many cells found no room. */
export const crowded = signal(0);
/** How many sessions hold no KV. */
export const without = signal(0);

/** Most cells that glide at once, and for how long: each one is a layer for the browser. Others jump. */
const MOST_GLIDES = 16;
const GLIDE_MS = 450;
const LOOK_MS = 1000;

const layout = new Layout();
let placed = new Map();
let size = { width: 0, height: 0 };
let frame = null;
let glides = 0;
let lookedAt = 0;

/** The signal of where a session is: `spots` has its rectangles by tier, `{device: {x, y, width, height}}`, without the
 * tiers that hold none. While it `glides` it is on its way there. */
export const placesOf = perSession({ spots: {}, glides: false });

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
  if (isTimeToLook() && layout.isOutgrown(views, size.width, size.height)) return false;
  for (const id of [...placed.keys()]) if (sessionOf(id).value === null) drop(id);
  let hasRoom = true;
  for (const view of views) {
    if (placed.get(view.id) === view) continue;
    hasRoom = layout.place(view) && hasRoom;
    placed.set(view.id, view);
    publish(view.id, true);
  }
  if (!hasRoom && crowded.value === 0) return false;
  tell(views);
  return true;
}

/** Whether the scale fits is looked at once a second: a session that finds no room says so at once. */
function isTimeToLook() {
  const isTime = performance.now() - lookedAt > LOOK_MS;
  if (isTime) lookedAt = performance.now();
  return isTime;
}

function arrange(views) {
  layout.arrange(views, size.width, size.height);
  placed = new Map(views.map((view) => [view.id, view]));
  for (const view of views) publish(view.id, false);
  tell(views);
}

function drop(id) {
  layout.remove(id);
  placed.delete(id);
}

function publish(id, mayGlide) {
  const spots = {};
  for (const tier of TIERS) {
    const spot = layout.spot(id, tier);
    if (spot) spots[tier] = spot;
  }
  const place = placesOf(id);
  const before = place.value.spots;
  if (JSON.stringify(before) === JSON.stringify(spots)) return;
  const isNew = Object.keys(before).length === 0;
  place.value = { spots, glides: mayGlide && !isNew && glides < MOST_GLIDES };
  if (place.value.glides) arriveLater(place);
}

function arriveLater(place) {
  glides += 1;
  setTimeout(() => {
    glides -= 1;
    place.value = { ...place.value, glides: false };
  }, GLIDE_MS);
}

function tell(views) {
  if (drawn.value !== ids.value) drawn.value = ids.value;
  without.value = views.filter((view) => bytesOf(view) === 0).length;
  crowded.value = layout.crowded.size;
}
