// What the model would say after each layer at each position: the answers of the server, fetched as they are looked at.
import { signal } from "@preact/signals";
import { call } from "../lib/api.js";

/** Positions in sight at first, and most of one request. */
const BLOCK = 64;
/** A round asks for one position, then for twice as many, or for half after a slower answer. */
const PATIENCE_MS = 900;
/** Tokens of a cell in sight, and at the position that is looked at: the most that the server tells. */
const [ONE, MOST] = [1, 5];
const NOWHERE = { first: 0, end: 0 };
const AGAIN_MS = 1000;

/** What a cell may show beside its likeliest token: whether it is about a token, or in comparison with another session, and what of
 * the server's answer it is. */
export const MEASURES = {
  top: { label: "the likeliest token" },
  p: { label: "probability of a token", ofToken: true, of: (layer, at) => probability(layer.chosen_logprobs[at][0] ?? null) },
  rank: { label: "rank of a token", ofToken: true, of: (layer, at) => (layer.ranks[at][0] ?? NaN) + 1 },
  entropy: { label: "entropy", of: (layer, at) => layer.entropies[at] ?? NaN },
  kl: { label: "KL to the last layer", of: (layer, at) => layer.divergences[at] ?? NaN },
  beside: { label: "KL to another session", ofSession: true, of: (layer, at) => layer.beside_divergences[at] ?? NaN },
};

/** The map of a session. `version` changes with its content; read it, then `column`. */
export function makeLensMap(id) {
  const state = {
    id, columns: new Map(), round: 0, end: 0, wanted: NOWHERE, detail: null, numLayers: 0, asking: null, most: 1,
    measure: { kind: "top", tokenId: null, beside: null },
  };
  const map = {
    version: signal(0),
    /** One more than the last position. */
    end: signal(0),
    /** Counts what brings the last positions into sight, wherever one has scrolled. */
    calls: signal(0),
    loading: signal(false),
    error: signal(null),
    /** What is known at a position: `{position, tokenId, text, rows, values, old, tried}`, or undefined. `rows` is a Map from
     * layers to tokens, best first: `{tokenId, text, p}`; `values` one to what is measured. `old` has layers to ask for anew,
     * `tried` by layer the round in which it was asked for, and how many tokens. */
    column: (position) => state.columns.get(position),
    /** `{done, all}`: of the cells in sight, how many need not be asked for. */
    progress: () => progressOf(state),
    /** The history has `end` positions now, and there may be more to know of them. What is known stays, and what is
     * under way comes, unless `isAnew` says that others may stand there. `calls` says that one must see the last. */
    show: (end, numLayers, { isAnew, calls }) => {
      if (isAnew) state.asking?.abort();
      cut(state.columns, isAnew ? 0 : end);
      Object.assign(state, { end, numLayers, wanted: sightAt(calls ? { end, wanted: NOWHERE } : state, end) });
      map.end.value = end;
      if (calls) map.calls.value += 1;
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
    /** Show this of each cell too: a key of `MEASURES`, with its token or the id of its session. */
    measure: ({ kind, tokenId, beside }) => {
      const known = state.measure;
      if (kind === known.kind && tokenId === known.tokenId && beside === known.beside) return;
      state.measure = { kind, tokenId, beside };
      state.asking?.abort();
      for (const { values } of state.columns.values()) values.clear();
      begin(state, map);
    },
    /** What is known after a layer is not so any more: it stays until there is an answer. Null: all of them, at once. */
    forget: (layer = null) => {
      state.asking?.abort();
      for (const { rows, values, old } of state.columns.values()) {
        if (layer === null) [rows, values].forEach((each) => each.clear());
        else old.add(layer);
      }
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

function progressOf(state) {
  const { first, end } = state.wanted;
  let missed = 0;
  for (let position = first; position < end; position++) missed += missing(state, position, ONE).length;
  const all = (end - first) * state.numLayers;
  return { done: all - missed, all };
}

/** Begin a round: what is missing may be there by now. */
function begin(state, map) {
  state.round += 1;
  state.most = 1;
  map.version.value += 1;
  work(state, map);
}

async function work(state, map) {
  if (map.loading.peek()) return;
  map.loading.value = true;
  try {
    for (let next = nextOf(state); next !== null; next = nextOf(state)) {
      const began = performance.now();
      await ask(state, next);
      const isSlow = performance.now() - began > PATIENCE_MS;
      state.most = isSlow ? Math.max(1, state.most >> 1) : Math.min(BLOCK, 2 * state.most);
      map.version.value += 1;
    }
    map.error.value = null;
  } catch (error) {
    map.error.value = error;
    clearTimeout(state.again);
    if (error.status === 0) state.again = setTimeout(work, AGAIN_MS, state, map); // the connection has dropped
  }
  map.loading.value = false;
}

async function ask(state, next) {
  const { round, measure } = state;
  const { signal } = (state.asking = new AbortController());
  try {
    for (const column of await fetchLens(state.id, next, measure, signal)) {
      if (!signal.aborted && column.position < state.end) storeColumn(state.columns, column, next, round);
    }
  } catch (error) {
    if (error.name !== "AbortError" && round === state.round) throw error; // else there is another question
  }
}

/** What to ask for next, `{first, end, layers, count}`: the position that is looked at, or else the last ones in sight
 * that miss the same. Null if all is known that there is in this round. */
function nextOf(state) {
  const { wanted, detail, end } = state;
  const looked = detail !== null && detail < end ? missing(state, detail, MOST) : [];
  if (looked.length) return { first: detail, end: detail + 1, layers: looked, count: MOST };
  const missed = (position) => missing(state, position, ONE).join();
  let last = wanted.end - 1;
  while (last >= wanted.first && !missed(last)) last -= 1;
  if (last < wanted.first) return null;
  const same = missed(last);
  let first = last;
  while (first > wanted.first && last + 1 - first < state.most && missed(first - 1) === same) first -= 1;
  return { first, end: last + 1, layers: missing(state, last, ONE), count: ONE };
}

/** The layers of which fewer than `count` tokens are known at a position, or not what is measured, if they were not asked for
 * in this round. */
function missing({ columns, round, numLayers, measure }, position, count) {
  const column = columns.get(position);
  return [...Array(numLayers).keys()].filter((layer) => {
    const tried = column?.tried.get(layer);
    if (tried?.round === round && tried.count >= count) return false;
    const isKnown = column?.rows.get(layer)?.length >= count && (measure.kind === "top" || column.values.has(layer));
    return !isKnown || column.old.has(layer);
  });
}

/** Put an answer into `columns`. It adds to what is known there, unless another token stands there now. */
function storeColumn(columns, fresh, { layers, count }, round) {
  const known = columns.get(fresh.position);
  const before = known?.tokenId === fresh.tokenId ? known : { rows: [], values: [], old: [], tried: [] };
  const [rows, values, old, tried] = [new Map(before.rows), new Map(before.values), new Set(before.old), new Map(before.tried)];
  for (const layer of layers) {
    const top = fresh.rows.get(layer);
    if (old.delete(layer)) rows.delete(layer);
    if (top && !(rows.get(layer)?.length > top.length)) rows.set(layer, top);
    if (!Number.isNaN(fresh.values.get(layer) ?? NaN)) values.set(layer, fresh.values.get(layer)); // the others may be known later
    tried.set(layer, { round, count });
  }
  columns.set(fresh.position, { ...fresh, rows, values, old, tried });
}

/** What is asked of the server for a measure. */
export function askedOf({ kind, tokenId, beside }) {
  const { ofToken, ofSession, of } = MEASURES[kind];
  return { tokens: ofToken ? [tokenId] : undefined, beside: ofSession ? beside : undefined, measures: of && !ofToken && !ofSession ? true : undefined };
}

/** A list of `{position, tokenId, text, rows, values}` for positions in `[first, end)`, where `rows` is a Map from layers to
 * the `count` best tokens, `{tokenId, text, p}`: without a layer whose residual stream is not kept there. `p` is NaN
 * where that is not finite. */
async function fetchLens(id, { first, end, layers, count }, measure, signal) {
  const { of } = MEASURES[measure.kind];
  const query = { positions: `${first}:${end}`, layers: layers.join(","), top_k: count, ...askedOf(measure) };
  const found = await call("GET", `/v1/sessions/${id}/lens`, { query, signal });
  const textOf = (tokenId) => found.texts[tokenId];
  return found.token_ids.map((tokenId, at) => {
    const kept = found.layers.filter((each) => each.token_ids[at].length);
    const rows = new Map(kept.map((each) => [each.layer, topOf(each, at, textOf)]));
    const values = new Map(of ? kept.map((each) => [each.layer, of(each, at)]) : []);
    return { position: first + at, tokenId, text: textOf(tokenId), rows, values };
  });
}

const topOf = ({ token_ids, logprobs }, at, textOf) =>
  token_ids[at].map((tokenId, rank) => ({ tokenId, text: textOf(tokenId), p: probability(logprobs[at][rank]) }));

const probability = (logprob) => (logprob === null ? NaN : Math.exp(logprob));

/** The layer from which on a column's last answer is the likeliest: `{layer, token}`, as far as it is known without a gap; null
 * without an answer. */
export function leadOf(column) {
  const known = [...(column?.rows.keys() ?? [])].sort((one, other) => other - one);
  if (known.length === 0) return null;
  const token = column.rows.get(known[0])[0];
  let layer = known[0];
  while (column.rows.get(layer - 1)?.[0].tokenId === token.tokenId) layer -= 1;
  return { layer, last: known[0], token };
}
