// The sessions that pass the filters, in order, and how many have each value. Made anew a few times a second at most.
import { batch, effect, signal, untracked } from "@preact/signals";
import { all, revision } from "../state/sessions.js";
import { FACETS, ORDERS, chosen, hasText, isFiltered, order, text, wordsOf } from "./filters.js";

const INTERVAL_MS = 400;

/** Ids in the table's order. */
export const listed = signal([]);
/** `{facet: {value: count}}`: how many sessions would be left with this value, given what the other facets say. */
export const counts = signal({});
/** The ids that pass; null if nothing is filtered. */
export const passing = signal(null);

let timer = null;

/** Keep the lists true until the function that this answers is called. */
export function keepListing() {
  const stop = effect(() => {
    void [text.value, chosen.value, order.value];
    refresh();
  });
  const stopNews = effect(() => {
    void revision.value;
    timer ??= setTimeout(refresh, INTERVAL_MS);
  });
  return () => (stop(), stopNews(), clearTimeout(timer), (timer = null));
}

function refresh() {
  clearTimeout(timer);
  timer = null;
  untracked(() => {
    const { found, tally } = sift(all());
    const ids = sorted(found).map((view) => view.id);
    batch(() => {
      counts.value = tally;
      passing.value = isFiltered() ? new Set(ids) : null;
      if (!isSame(ids, listed.value)) listed.value = ids;
    });
  });
}

function sift(views) {
  const [words, asked] = [wordsOf(text.value), chosen.value];
  const tally = Object.fromEntries(FACETS.map(({ key, values }) => [key, Object.fromEntries(values.map((each) => [each, 0]))]));
  const found = [];
  for (const view of views) {
    if (!hasText(view, words)) continue;
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

const isSame = (one, other) => one.length === other.length && one.every((id, index) => id === other[index]);
