// Every session that the caller may see, as the live stream tells of them.
import { batch, signal } from "@preact/signals";
import { connection } from "./connection.js";
import { forget } from "./per_session.js";

/** Ids, oldest first. */
export const ids = signal([]);
/** Whether a first snapshot has come. */
export const known = signal(false);
/** Counts the changes to any session, for those who show many of them. */
export const revision = signal(0);
const views = new Map();

/** The signal of a session's view: null if there is none of that id. A part of the page that shows one session reads
 * its signal, so news of others cost it nothing. */
export function sessionOf(id) {
  if (!views.has(id)) views.set(id, signal(null));
  return views.get(id);
}

/** All views now, oldest first. */
export const all = () => ids.value.map((id) => sessionOf(id).value).filter(Boolean);

/** The word for a session's state. While the server is away it is what the session did when the page last heard. */
export const stateWord = ({ state }) => (connection.value.state === "away" ? `was ${state}` : state);

/** The sessions of a whole snapshot: those that are not in it are gone. */
export function replaceAll(found) {
  batch(() => {
    const fresh = new Set(found.map((view) => view.id));
    for (const [id, view] of views) {
      if (fresh.has(id)) continue;
      view.value = null;
      forget(id);
    }
    for (const view of found) sessionOf(view.id).value = view;
    ids.value = found.map((view) => view.id);
    known.value = true;
    revision.value = revision.peek() + 1;
  });
}

/** None is known any more: another key is told of others. */
export function forgetAll() {
  replaceAll([]);
  known.value = false;
}

/** What a call of this page has opened. The live stream may have told of it before, and of what came after: it knows
 * better. */
export function add(view) {
  if (sessionOf(view.id).value === null) put(view);
}

/** A session that has opened or changed. */
export function put(view) {
  batch(() => {
    const isNew = sessionOf(view.id).value === null;
    sessionOf(view.id).value = view;
    if (isNew) ids.value = [...ids.value, view.id];
    revision.value = revision.peek() + 1;
  });
}

/** A session that is gone. */
export function remove(id) {
  if (!views.get(id)?.value) return;
  batch(() => {
    views.get(id).value = null;
    forget(id);
    ids.value = ids.value.filter((each) => each !== id);
    revision.value = revision.peek() + 1;
  });
}
