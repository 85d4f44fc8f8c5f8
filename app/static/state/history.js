// The tokens of each session as the server last told them, and what is known of each.
import { call } from "../lib/api.js";
import { isSeen } from "./happenings.js";
import { perSession } from "./per_key.js";
import { sessionOf } from "./sessions.js";

/** The signal of a session's history: `{tokens, error}`. `tokens` is null before the first answer; `error` is that of
 * the last call. A token is `{id, text, special}` and stands at its index. */
export const historyOf = perSession({ tokens: null, error: null });
/** The last call of each. */
const lastCall = perSession(null);

/** Ask for it again. Of two calls under way the later one counts. */
export async function loadHistory(id) {
  if (sessionOf(id).peek() === null) return;
  const [history, last, mine] = [historyOf(id), lastCall(id), {}];
  last.value = mine;
  try {
    const answer = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } });
    if (last.peek() === mine) history.value = { tokens: tokensOf(answer), error: null };
  } catch (error) {
    if (last.peek() === mine) history.value = { ...history.value, error };
  }
}

/** Special tokens are told by their form; the API has no word for them. */
const SPECIAL = /^<[^<>\s]+>$/;

const tokensOf = ({ token_ids, pieces }) =>
  token_ids.map((id, position) => ({ id, text: pieces[position], special: SPECIAL.test(pieces[position]) }));

/** `{generated, cached, recomputed}`, lists of `[first, end]` positions. The last two are those of `paused`, the usage of
 * this page's paused turn, else of `lastTurn`, that of the last turn that is over; both may be null. Earlier turns are
 * known if this page saw them. `length` is how many tokens the history has now. */
export function marksOf(happenings, lastTurn, paused, length) {
  const marks = { generated: [], cached: [], recomputed: [] };
  if (lastTurn !== null && !happenings.some(turnIn)) addTurn(marks, lastTurn);
  for (const happening of happenings) {
    if (happening.name === "session") cut(marks.generated, happening.data.session.tokens);
    const turn = turnIn(happening);
    if (turn) addTurn(marks, turn);
  }
  if (paused !== null) addTurn(marks, paused);
  for (const runs of Object.values(marks)) cut(runs, length);
  return marks;
}

/** The usage of the turn that a happening tells of as over, if it does. */
function turnIn(happening) {
  if (isSeen(happening)) return happening.data.session.usage.last_turn;
  return happening.name === "turn" && happening.data.status === "finished" ? happening.data.usage : null;
}

function addTurn(marks, { prompt_tokens, cached_tokens, completion_tokens, tokens_recomputed }) {
  cut(marks.generated, prompt_tokens);
  if (completion_tokens) marks.generated.push([prompt_tokens, prompt_tokens + completion_tokens]);
  marks.cached = [[0, cached_tokens]];
  marks.recomputed = [[cached_tokens, Math.min(cached_tokens + tokens_recomputed, prompt_tokens)]];
}

/** Drop what is past the end of a history that has been rewound. */
function cut(runs, length) {
  while (runs.length && runs.at(-1)[0] >= length) runs.pop();
  const last = runs.at(-1);
  if (last && last[1] > length) runs[runs.length - 1] = [last[0], length];
}

export const isIn = (runs, position) => runs.some(([first, end]) => first <= position && position < end);
