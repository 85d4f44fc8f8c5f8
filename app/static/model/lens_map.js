// What the model would say after each layer at each position: the server's answers, fetched as they are looked at.
import { signal } from "@preact/signals";
import { fetchLens } from "./fetch_lens.js";

/** Most positions of one request. */
const BLOCK = 64;

/** The map of a session. `version` changes with its content; read it, then `column`. */
export function makeLensMap(id) {
  const columns = new Map();
  const state = { id, columns, round: 0, wanted: { first: 0, end: 0 }, numLayers: 0, working: false };
  const map = {
    version: signal(0),
    /** One more than the last position. */
    end: signal(0),
    loading: signal(false),
    error: signal(null),
    /** `{position, tokenId, text, rows}`, or undefined where nothing is known. `rows` is a Map from layers to tokens,
     * best first: `{tokenId, text, p}`. */
    column: (position) => columns.get(position),
    /** The history has `end` positions now, and there may be more to know of them. */
    show: (end, numLayers) => {
      for (const position of columns.keys()) if (position >= end) columns.delete(position);
      state.round += 1;
      state.numLayers = numLayers;
      state.wanted = { first: Math.max(0, end - BLOCK), end };
      map.end.value = end;
      map.version.value += 1;
      work(state, map);
    },
    /** These positions are in sight. The last ones come first. */
    want: (first, end) => {
      state.wanted = { first: Math.max(0, first), end: Math.min(end, map.end.peek()) };
      work(state, map);
    },
    /** Forget everything: the captures are gone. */
    clear: () => {
      columns.clear();
      map.show(map.end.peek(), state.numLayers);
    },
  };
  return map;
}

async function work(state, map) {
  if (state.working) return;
  state.working = true;
  try {
    for (let next = missing(state); next !== null; next = missing(state)) {
      map.loading.value = true;
      await load(state, next);
      map.error.value = null;
      map.version.value += 1;
    }
  } catch (error) {
    map.error.value = error;
  }
  state.working = false;
  map.loading.value = false;
}

/** The last positions in sight that have not been asked for since the session came here, with the layers that are not
 * known there. */
function missing({ columns, round, wanted, numLayers }) {
  let last = wanted.end - 1;
  while (last >= wanted.first && !isOpen(columns.get(last), round, numLayers)) last -= 1;
  if (last < wanted.first) return null;
  const first = Math.max(wanted.first, last - BLOCK + 1);
  const layers = [];
  for (let layer = 0; layer < numLayers; layer += 1) {
    for (let position = first; position <= last; position += 1) {
      if (columns.get(position)?.rows.has(layer)) continue;
      layers.push(layer);
      break;
    }
  }
  return { first, end: last + 1, layers };
}

const isOpen = (column, round, numLayers) =>
  column === undefined || (column.round !== round && column.rows.size < numLayers);

async function load({ id, columns, round }, { first, end, layers }) {
  const found = await fetchLens(id, first, end, layers);
  for (let position = first; position < end; position += 1) {
    const fresh = found.get(position) ?? { position, tokenId: null, text: "", rows: new Map() };
    const known = columns.get(position);
    const isSame = known !== undefined && (fresh.tokenId === null || known.tokenId === fresh.tokenId);
    const rows = isSame ? new Map([...known.rows, ...fresh.rows]) : fresh.rows;
    columns.set(position, { ...(fresh.tokenId === null && known ? known : fresh), rows, round });
  }
}
