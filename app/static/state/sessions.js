// Every session that the caller may see, as the live stream tells of them.
import { batch, signal } from "@preact/signals";
import { isAway } from "./connection.js";
import { memory } from "./memory.js";
import { forget, forgetWithKey, perKey } from "./per_key.js";

/** Ids, oldest first. */
export const ids = perKey([]);
/** Whether a first snapshot has come. */
export const known = perKey(false);
/** Counts the changes to any session, for those who show many of them. */
export const revision = signal(0);
const views = new Map();
const NONE = signal(null);

/** The last ids that are gone: an answer with a view may come after the news of its end. */
const gone = new Set();
const GONE_KEPT = 1000;

forgetWithKey(() => {
  replaceAll([]);
  known.value = false;
  gone.clear();
});

/** The signal of a session's view: null if there is none of that id. A part of the page that shows one session reads
 * its signal, so news of others cost it nothing. One that asks for a session that is not there is told of any that
 * opens. */
export function sessionOf(id) {
  const view = views.get(id);
  if (view === undefined) void ids.value;
  return view ?? NONE;
}

/** All views now, oldest first. */
export const all = () => ids.value.map((id) => sessionOf(id).value).filter(Boolean);

/** Ids of those whose turns run now. */
export const running = () => all().filter(({ state }) => state === "running").map(({ id }) => id);

/** The word for a session's turn. While the server is away it is what the turn did when the page last heard. */
export const turnWord = ({ state }) => (state === "idle" ? (isAway() ? "had no turn" : "no turn") : isAway() ? `was ${state}` : state);

/** The sessions of a whole snapshot: those that are not in it are gone. */
export function replaceAll(found) {
  batch(() => {
    const fresh = new Set(found.map((view) => view.id));
    for (const id of [...views.keys()]) if (!fresh.has(id)) drop(id);
    for (const view of found) set(view);
    ids.value = found.map((view) => view.id);
    known.value = true;
    revision.value = revision.peek() + 1;
  });
}

/** What a call of this page has opened. The live stream may have told of it before, and of what came after: it knows
 * better. */
export function add(view) {
  if (!views.has(view.id) && !gone.has(view.id)) put(view);
}

/** A session that has opened or changed. */
export function put(view) {
  batch(() => {
    if (!views.has(view.id)) ids.value = [...ids.value, view.id];
    set(view);
    revision.value = revision.peek() + 1;
  });
}

/** A turn of this page stands at this checkpoint: the live stream tells of it later, and the next step must know. */
export function stand(id, checkpoint) {
  const view = sessionOf(id).peek();
  if (view !== null) put({ ...view, state: "paused", checkpoint });
}

/** How many tokens sessions have by now: an object by id. */
export function grow(tokens) {
  batch(() => {
    for (const [id, count] of Object.entries(tokens)) {
      const view = views.get(id);
      if (view) view.value = { ...view.peek(), tokens: count, kv: grown(view.peek().kv, count - 1) };
    }
    revision.value = revision.peek() + 1;
  });
}

/** With the KV of so many tokens, as the server counts it. */
function grown(kv, tokens) {
  const { block_tokens, block_bytes } = memory.peek()?.data ?? {};
  const blocks = Math.ceil(tokens / block_tokens);
  return kv.tier === "device" && blocks > kv.blocks ? { ...kv, blocks, device_bytes: blocks * block_bytes } : kv;
}

/** A session that is gone. */
export function remove(id) {
  gone.add(id);
  if (gone.size > GONE_KEPT) gone.delete(gone.values().next().value);
  if (!views.has(id)) return;
  batch(() => {
    drop(id);
    ids.value = ids.value.filter((each) => each !== id);
    revision.value = revision.peek() + 1;
  });
}

function set(view) {
  if (views.has(view.id)) views.get(view.id).value = view;
  else views.set(view.id, signal(view));
}

function drop(id) {
  views.get(id).value = null;
  views.delete(id);
  forget(id);
}
