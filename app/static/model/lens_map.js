// What the model would say after each layer at each position: the answers of the server, fetched as they are looked at.
import { signal } from "@preact/signals";
import { call } from "../lib/api.js";

/** Most positions of one request. */
const BLOCK = 64;
/** Tokens of the position that is looked at: the most that the server tells. */
const MOST = 5;
const NOWHERE = { first: 0, end: 0 };

/** The map of a session. `version` changes with its content; read it, then `column`. */
export function makeLensMap(id) {
  const state = { id, columns: new Map(), round: 0, end: 0, wanted: NOWHERE, detail: null, numLayers: 0, asking: null };
  const map = {
    version: signal(0),
    /** One more than the last position. */
    end: signal(0),
    loading: signal(false),
    error: signal(null),
    /** What is known at a position: `{position, tokenId, text, rows}`, or undefined. `rows` is a Map from layers to
     * tokens, best first: `{tokenId, text, p}`. */
    column: (position) => state.columns.get(position),
    /** The history has `end` positions now, and there may be more to know of them. `isAnew` says that others may stand
     * there than before. */
    show: (end, numLayers, isAnew) => {
      cut(state.columns, isAnew ? 0 : end);
      Object.assign(state, { end, numLayers, wanted: sightAt(state, end) });
      map.end.value = end;
      begin(state, map);
    },
    /** These positions are in sight. The last ones come first. */
    want: (first, end) => {
      state.wanted = { first: Math.max(0, first), end: Math.min(end, state.end) };
      work(state, map);
    },
    /** More tokens of this position, before all others. */
    lookAt: (position) => {
      state.detail = position;
      work(state, map);
    },
    /** What is known after a layer (null: all of them) is not so any more. */
    forget: (layer = null) => {
      for (const { rows } of state.columns.values()) layer === null ? rows.clear() : rows.delete(layer);
      begin(state, map);
    },
    /** Nobody looks any more. */
    leave: () => {
      Object.assign(state, { wanted: NOWHERE, detail: null });
      state.asking?.abort();
    },
  };
  return map;
}

function cut(columns, end) {
  for (const position of columns.keys()) if (position >= end) columns.delete(position);
}

/** What is in sight when the history has `end` positions: the last ones, unless one has scrolled away from them. */
function sightAt({ end: before, wanted }, end) {
  const hasScrolled = wanted.first < wanted.end && wanted.end < before;
  if (!hasScrolled) return { first: Math.max(0, end - BLOCK), end };
  return { first: Math.min(wanted.first, end), end: Math.min(wanted.end, end) };
}

/** Begin a round: an answer that is under way is about what was before. */
function begin(state, map) {
  state.round += 1;
  state.asking?.abort();
  map.version.value += 1;
  work(state, map);
}

async function work(state, map) {
  if (map.loading.peek()) return;
  map.loading.value = true;
  try {
    for (let next = nextOf(state); next !== null; next = nextOf(state)) {
      await ask(state, next);
      map.version.value += 1;
    }
    map.error.value = null;
  } catch (error) {
    map.error.value = error;
  }
  map.loading.value = false;
}

async function ask(state, next) {
  const { round } = state;
  state.asking = new AbortController();
  try {
    const found = await fetchLens(state.id, next, state.asking.signal);
    if (round === state.round) for (const column of found) storeColumn(state.columns, column, next, round);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

/** What to ask for next, `{first, end, layers, count}`: the position that is looked at, or else the last ones in sight
 * that have not been asked for since the session came here. Null if all is known. */
function nextOf({ columns, round, end, wanted, detail, numLayers }) {
  const all = Array.from({ length: numLayers }, (_, layer) => layer);
  if (numLayers === 0) return null;
  if (detail !== null && detail < end && columns.get(detail)?.best !== round) {
    return { first: detail, end: detail + 1, layers: all, count: MOST };
  }
  const isOpen = (position) => {
    const column = columns.get(position);
    return column === undefined || (column.asked !== round && column.rows.size < numLayers);
  };
  let last = wanted.end - 1;
  while (last >= wanted.first && !isOpen(last)) last -= 1;
  if (last < wanted.first) return null;
  let first = Math.max(wanted.first, last - BLOCK + 1);
  while (!isOpen(first)) first += 1;
  const open = Array.from({ length: last + 1 - first }, (_, at) => first + at);
  const layers = all.filter((layer) => open.some((position) => !columns.get(position)?.rows.has(layer)));
  return { first, end: last + 1, layers, count: 1 };
}

/** Put an answer into `columns`. It adds to what is known there, unless another token stands there now. `asked` and
 * `best` say in which round this position was asked for, and for how much. */
function storeColumn(columns, fresh, { count }, round) {
  const known = columns.get(fresh.position);
  const isSame = known?.tokenId === fresh.tokenId;
  const rows = isSame ? new Map(known.rows) : new Map();
  for (const [layer, top] of fresh.rows) if ((rows.get(layer)?.length ?? 0) <= top.length) rows.set(layer, top);
  const best = count > 1 ? round : isSame ? known.best : null;
  columns.set(fresh.position, { ...fresh, rows, asked: round, best });
}

/** A list of `{position, tokenId, text, rows}` for positions in `[first, end)`, where `rows` is a Map from layers to
 * the `count` best tokens, `{tokenId, text, p}`: without a layer whose residual stream is not kept there. `p` is NaN
 * where that is not finite. */
async function fetchLens(id, { first, end, layers, count }, signal) {
  const query = { positions: `${first}:${end}`, layers: layers.join(","), top_k: count };
  const found = await call("GET", `/v1/sessions/${id}/lens`, { query, signal });
  const textOf = (tokenId) => found.texts[tokenId];
  return found.token_ids.map((tokenId, at) => {
    const kept = found.layers.filter((each) => each.token_ids[at].length);
    const rows = new Map(kept.map((each) => [each.layer, topOf(each, at, textOf)]));
    return { position: first + at, tokenId, text: textOf(tokenId), rows };
  });
}

const topOf = ({ token_ids, logprobs }, at, textOf) =>
  token_ids[at].map((tokenId, rank) => ({ tokenId, text: textOf(tokenId), p: probability(logprobs[at][rank]) }));

const probability = (logprob) => (logprob === null ? NaN : Math.exp(logprob));
