// What the model would say after each layer at each position: the answers of the server, fetched as they are looked at.
import { signal } from "@preact/signals";
import { call } from "../lib/api.js";

/** Most positions of one request. */
const BLOCK = 64;
/** Tokens of the position that is looked at: the most that the server tells. */
const MOST = 5;

/** The map of a session. `version` changes with its content; read it, then `column`. */
export function makeLensMap(id) {
  const wanted = { first: 0, end: 0 };
  const state = { id, columns: new Map(), round: 0, wanted, detail: null, numLayers: 0, working: false };
  const map = {
    version: signal(0),
    /** One more than the last position. */
    end: signal(0),
    loading: signal(false),
    error: signal(null),
    /** What is known at a position: `{position, tokenId, text, rows}`, or undefined. `rows` is a Map from layers to
     * tokens, best first: `{tokenId, text, p}`. */
    column: (position) => state.columns.get(position),
    /** The history has `end` positions now, and there may be more to know of them. */
    show: (end, numLayers) => {
      for (const position of state.columns.keys()) if (position >= end) state.columns.delete(position);
      Object.assign(state, { round: state.round + 1, numLayers, wanted: { first: Math.max(0, end - BLOCK), end } });
      map.end.value = end;
      touch(state, map);
    },
    /** These positions are in sight. The last ones come first. */
    want: (first, end) => {
      state.wanted = { first: Math.max(0, first), end: Math.min(end, map.end.peek()) };
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
      state.round += 1;
      touch(state, map);
    },
  };
  return map;
}

function touch(state, map) {
  map.version.value += 1;
  work(state, map);
}

async function work(state, map) {
  if (state.working) return;
  state.working = true;
  map.loading.value = true;
  try {
    for (let next = nextOf(state); next !== null; next = nextOf(state)) {
      const { round } = state;
      const found = await fetchLens(state.id, next.first, next.end, next.layers, next.count);
      for (const column of found.values()) storeColumn(state.columns, column, next, round);
      map.version.value += 1;
    }
    map.error.value = null;
  } catch (error) {
    map.error.value = error;
  }
  state.working = false;
  map.loading.value = false;
}

/** What to ask for next, `{first, end, layers, count}`: the position that is looked at, or else the last ones in sight
 * that have not been asked for since the session came here. Null if all is known. */
function nextOf({ columns, round, wanted, detail, numLayers }) {
  const all = Array.from({ length: numLayers }, (_, layer) => layer);
  if (numLayers === 0) return null;
  if (detail !== null && detail < wanted.end && columns.get(detail)?.best !== round) {
    return { first: detail, end: detail + 1, layers: all, count: MOST };
  }
  const isOpen = (position) => {
    const column = columns.get(position);
    return column === undefined || (column.asked !== round && column.rows.size < numLayers);
  };
  let last = wanted.end - 1;
  while (last >= wanted.first && !isOpen(last)) last -= 1;
  if (last < wanted.first) return null;
  const first = Math.max(wanted.first, last - BLOCK + 1);
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

const TRIES = 6;

/** A Map from positions in `[first, end)` to `{position, tokenId, text, rows}`, where `rows` is a Map from layers to
 * the `count` best tokens, `{tokenId, text, p}`: without a layer whose residual stream is not kept there. `p` is NaN
 * where that is not finite. */
async function fetchLens(id, first, end, layers, count) {
  const query = { positions: `${first}:${end}`, layers: layers.join(","), top_k: count };
  const found = await patiently(() => call("GET", `/v1/sessions/${id}/lens`, { query }));
  const textOf = (tokenId) => found.texts[tokenId];
  const columns = found.token_ids.map((tokenId, at) => {
    const kept = found.layers.filter((each) => each.token_ids[at].length);
    const rows = new Map(kept.map((each) => [each.layer, topOf(each, at, textOf)]));
    return { position: first + at, tokenId, text: textOf(tokenId), rows };
  });
  return new Map(columns.map((each) => [each.position, each]));
}

const topOf = ({ token_ids, logprobs }, at, textOf) =>
  token_ids[at].map((tokenId, rank) => ({ tokenId, text: textOf(tokenId), p: probability(logprobs[at][rank]) }));

const probability = (logprob) => (logprob === null ? NaN : Math.exp(logprob));

/** A session has one map at a time: another tab that looks at the same session takes it away. Each waits for another
 * time, so that they do not go on doing so. */
async function patiently(ask) {
  for (let wait = 250; ; wait *= 2) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 409 || wait > 250 * 2 ** TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, wait * (0.5 + Math.random())));
    }
  }
}
