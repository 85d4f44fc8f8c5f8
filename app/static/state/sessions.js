// Every session that the caller may see, as the live stream tells of them.
import { batch, signal } from "@preact/signals";

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

/** The sessions of a whole snapshot: those that are not in it are gone. */
export function replaceAll(found) {
  batch(() => {
    const fresh = new Set(found.map((view) => view.id));
    for (const [id, view] of views) if (!fresh.has(id)) view.value = null;
    for (const view of found) sessionOf(view.id).value = view;
    ids.value = found.map((view) => view.id);
    known.value = true;
    revision.value = revision.peek() + 1;
  });
}

/** A session that has opened or changed. Also for what a call of this page has answered. */
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
    ids.value = ids.value.filter((each) => each !== id);
    revision.value = revision.peek() + 1;
  });
}
