// Which sessions the screen shows, in which order, and how many have each value. It is about this tab only.
import { batch, effect, signal, untracked } from "@preact/signals";
import { nameOf } from "../lib/format.js";
import { memory } from "../state/memory.js";
import { perKey } from "../state/per_key.js";
import { heed, tell } from "../state/route.js";
import { all, revision } from "../state/sessions.js";
import { bytesIn, bytesOf, leftOf, lookOf, looksOf, placeOf, tagsOf, TIERS } from "./looks.js";

/** What may be chosen; sessions pass that have one of the chosen values, or any if none is chosen. */
export const FACETS = [
  { key: "turn", title: "Turn", values: ["none", ...looksOf("turn")], of: ({ state }) => (state === "idle" ? "none" : state) },
  { key: "phase", title: "Phase", values: looksOf("phase"), of: ({ phase }) => phase },
  { key: "place", title: "Place", values: [...TIERS, "none"], of: placeOf },
];
const NONE = { turn: [], phase: [], place: [] };

export const text = perKey("");
/** The chosen values by facet. */
export const chosen = perKey(NONE);
/** Ids that somebody wants to see alone; null: all. */
export const picked = perKey(null);
/** `by` is a key of `ORDERS`. */
export const order = signal({ by: "created", down: true });
/** What sessions are grouped by, one of `groupings`; "": nothing. */
export const grouping = signal("");
/** Names of the groups that are folded. */
export const folded = perKey([]);
/** Whether rows are high. */
export const isRoomy = signal(false);

/** What a column is sorted by. */
const ORDERS = {
  name: (view) => nameOf(view).toLowerCase(),
  turn: (view) => lookOf(view).key,
  tokens: (view) => view.tokens,
  bytes: bytesOf,
  device: (view) => bytesIn(view, "device"),
  host: (view) => bytesIn(view, "host"),
  disk: (view) => bytesIn(view, "disk"),
  resume: ({ usage: { resume_ms: wait } }) => wait.queue + wait.restore + wait.prefill,
  created: (view) => view.created_at,
  returns: (view) => leftOf(view, 0) ?? Infinity,
};

export function toggle(facet, value) {
  const values = chosen.value[facet];
  const changed = values.includes(value) ? values.filter((each) => each !== value) : [...values, value];
  chosen.value = { ...chosen.value, [facet]: changed };
}

export function clear() {
  chosen.value = NONE;
  text.value = "";
  picked.value = null;
}

export const isFiltered = () => picked.value !== null || text.value.trim() !== "" || Object.values(chosen.value).some((values) => values.length > 0);

/** Group by another one, or by nothing: all groups are open at first. */
export const group = (by) => batch(() => ((folded.value = []), (grouping.value = by)));

/** Sort by a column: the largest first, and the other way round if it is sorted so already. */
export const sortBy = (by) => (order.value = { by, down: order.value.by === by ? !order.value.down : true });

/** Whether a session has the words that are searched for, in its id, tenant or metadata. */
function hasText(view, words) {
  if (words.length === 0) return true;
  const found = [view.id, view.tenant ?? "", ...tagsOf(view)].join("\n").toLowerCase();
  return words.every((word) => found.includes(word));
}

const wordsOf = (typed) => typed.toLowerCase().split(/\s+/).filter(Boolean);

const INTERVAL_MS = 400;

/** Ids in the table's order. */
export const listed = perKey([]);
/** The table's rows: ids, and above those of a group `{name, ids, bytes, isFolded}`. */
export const rows = perKey([]);
/** What sessions can be grouped by: what they have, and the names of their metadata. */
export const groupings = perKey([]);
/** `{facet: {value: count}}`: how many sessions would be left with this value, given what the other facets say. */
export const counts = perKey({});
/** The ids that pass; null if nothing is filtered. */
export const passing = perKey(null);

let timer = null;

/** Keep the lists and the address true until the function that this answers is called. An address that says something
 * is taken at its word. */
export function keepListing() {
  const stopAsked = heed((said) => said.size > 0 && batch(() => {
    text.value = said.get("find") ?? "";
    chosen.value = Object.fromEntries(FACETS.map(({ key, values }) => [key, values.filter((each) => said.get(key)?.split(",").includes(each))]));
    picked.value = said.get("only")?.split(",") ?? null;
    if (ORDERS[said.get("by")]) order.value = { by: said.get("by"), down: !said.has("up") };
    grouping.value = said.get("group") ?? "";
    isRoomy.value = said.has("roomy");
  }));
  const stop = effect(() => {
    const { by, down } = order.value;
    const facets = Object.entries(chosen.value).map(([key, values]) => [key, values.join()]);
    tell({ find: text.value, ...Object.fromEntries(facets), only: picked.value?.join(), by: by === "created" ? null : by, up: !down && "1", group: grouping.value, roomy: isRoomy.value && "1" });
    void folded.value;
    refresh();
  });
  const stopNews = effect(() => {
    void revision.value;
    if (grouping.value) void memory.value;
    timer ??= setTimeout(refresh, INTERVAL_MS);
  });
  return () => (stopAsked(), stop(), stopNews(), clearTimeout(timer), (timer = null));
}

function refresh() {
  clearTimeout(timer);
  timer = null;
  untracked(() => {
    const { found, tally } = sift(all());
    const ids = sorted(found).map(idOf);
    batch(() => {
      keep(groupings, [...new Set([...all().flatMap(labelsOf), ...FACETS.map(({ key }) => key)])]);
      counts.value = tally;
      passing.value = isFiltered() ? new Set(ids) : null;
      keep(listed, ids);
      rows.value = grouping.value ? grouped(found) : listed.value;
    });
  });
}

function sift(views) {
  const [words, asked] = [wordsOf(text.value), chosen.value];
  const tally = Object.fromEntries(FACETS.map(({ key, values }) => [key, Object.fromEntries(values.map((each) => [each, 0]))]));
  const found = [];
  for (const view of views) {
    if (!hasText(view, words) || picked.value?.includes(view.id) === false) continue;
    const values = FACETS.map(({ of }) => of(view));
    const failed = FACETS.filter(({ key }, index) => asked[key].length > 0 && !asked[key].includes(values[index]));
    FACETS.forEach((facet, index) => {
      if (failed.length === 0 || (failed.length === 1 && failed[0] === facet)) tally[facet.key][values[index]] += 1;
    });
    if (failed.length === 0) found.push(view);
  }
  return { found, tally };
}

function sorted(views) {
  const { by, down } = order.value;
  const key = ORDERS[by];
  const compare = (one, other) => (key(one) < key(other) ? -1 : key(one) > key(other) ? 1 : 0);
  views.sort((one, other) => (down ? compare(other, one) : compare(one, other)) || (one.id < other.id ? -1 : 1));
  return views;
}

const keep = (list, next) => (list.value.length === next.length && next.every((each, index) => each === list.value[index])) || (list.value = next);

const labelsOf = ({ tenant, metadata }) => [...(tenant === null ? [] : ["tenant"]), ...Object.keys(metadata)];

const idOf = ({ id }) => id;

/** Sorted views as rows, by the names of their groups; those that have none come last. */
function grouped(views) {
  const by = grouping.value;
  const of = by === "tenant" ? (view) => view.tenant : (FACETS.find(({ key }) => key === by)?.of ?? ((view) => view.metadata[by]));
  const groups = new Map();
  for (const view of views) {
    const name = of(view) ?? "";
    groups.set(name, groups.get(name) ?? []).get(name).push(view);
  }
  return [...groups].sort(([one], [other]) => !one - !other || (one < other ? -1 : 1)).flatMap(([name, members]) => {
    const [ids, isFolded] = [members.map(idOf), folded.value.includes(name)];
    return [{ name, ids, bytes: heldBy(members), isFolded }, ...(isFolded ? [] : ids)];
  });
}

/** Bytes of KV. What they share counts for each, but never for more than a tier has. */
function heldBy(views) {
  const owned = memory.peek()?.data;
  const sums = new Map(TIERS.map((tier) => [tier, 0]));
  for (const view of views) {
    const tier = TIERS.find((each) => bytesIn(view, each) === bytesOf(view));
    sums.set(tier, sums.get(tier) + bytesOf(view));
  }
  return TIERS.reduce((sum, tier) => sum + Math.min(sums.get(tier), owned?.[tier].owned_bytes ?? Infinity), 0);
}
