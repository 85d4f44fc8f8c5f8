// The tokens of each session, as the server last told them.
import { signal } from "@preact/signals";
import { call } from "../lib/api.js";

const histories = new Map();

/** The signal of a session's history: `{tokens, error}`. `tokens` is null before the first answer; `error` is that of
 * the last call. A token is `{id, text, special}` and stands at its index. */
export function historyOf(id) {
  if (!histories.has(id)) histories.set(id, signal({ tokens: null, error: null }));
  return histories.get(id);
}

/** Ask for it again. Of two calls under way the later one counts. */
export async function loadHistory(id) {
  const history = historyOf(id);
  const mark = (history.asked = (history.asked ?? 0) + 1);
  try {
    const answer = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } });
    if (history.asked === mark) history.value = { tokens: tokensOf(answer), error: null };
  } catch (error) {
    if (history.asked === mark) history.value = { ...history.value, error };
  }
}

/** Special tokens are told by their form; the API has no word for them. */
const SPECIAL = /^<[^<>\s]+>$/;

const tokensOf = ({ token_ids, pieces }) =>
  token_ids.map((id, position) => ({ id, text: pieces[position], special: SPECIAL.test(pieces[position]) }));
