// Which sessions the screen shows, and in which order. It is about this tab only: the server is not asked.
import { signal } from "@preact/signals";
import { bytesIn, bytesOf, placeOf, tagsOf } from "./looks.js";

/** What may be chosen; sessions pass that have one of the chosen values, or any if none is chosen. */
export const FACETS = [
  { key: "state", title: "State", values: ["idle", "queued", "running", "paused"], of: (view) => view.state },
  { key: "phase", title: "Phase", values: ["compute", "io_wait", "ready", "idle"], of: (view) => view.phase },
  { key: "tier", title: "Tier", values: ["device", "host", "disk", "moving", "none"], of: placeOf },
];
const NONE = { state: [], phase: [], tier: [] };

export const text = signal("");
/** The chosen values by facet. */
export const chosen = signal(NONE);
/** `by` is a key of `ORDERS`. */
export const order = signal({ by: "created", down: true });

/** What a column is sorted by. */
export const ORDERS = {
  id: (view) => view.id,
  state: (view) => view.state,
  phase: (view) => view.phase,
  tokens: (view) => view.tokens,
  bytes: bytesOf,
  device: (view) => bytesIn(view, "device"),
  host: (view) => bytesIn(view, "host"),
  disk: (view) => bytesIn(view, "disk"),
  resume: ({ usage: { resume_ms: wait } }) => wait.queue + wait.restore + wait.prefill,
  created: (view) => view.created_at,
  expires: (view) => view.expires_at ?? Infinity,
};

export function toggle(facet, value) {
  const values = chosen.value[facet];
  const changed = values.includes(value) ? values.filter((each) => each !== value) : [...values, value];
  chosen.value = { ...chosen.value, [facet]: changed };
}

export function clear() {
  chosen.value = NONE;
  text.value = "";
}

export const isFiltered = () => text.value.trim() !== "" || Object.values(chosen.value).some((values) => values.length > 0);

/** Sort by a column: the largest first, and the other way round if it is sorted so already. */
export const sortBy = (by) => (order.value = { by, down: order.value.by === by ? !order.value.down : true });

/** Whether a session has the words that are searched for, in its id, tenant or metadata. */
export function hasText(view, words) {
  if (words.length === 0) return true;
  const found = [view.id, view.tenant ?? "", ...tagsOf(view)].join("\n").toLowerCase();
  return words.every((word) => found.includes(word));
}

export const wordsOf = (typed) => typed.toLowerCase().split(/\s+/).filter(Boolean);
