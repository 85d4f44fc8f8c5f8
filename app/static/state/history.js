// The tokens of each session as the server last told them, and what is known of each.
import { call } from "../lib/api.js";
import { isSeen } from "./happenings.js";
import { perSession } from "./per_key.js";
import { sessionOf } from "./sessions.js";

/** The signal of a session's history: `{tokens, error}`. `tokens` is null before the first answer; `error` is that of
 * the last call. A token is `{id, text, special, role, chance}` and stands at its index: `role` is that of the message
 * that it opens, `chance` is how probable it was, where a turn of this page has generated it. */
export const historyOf = perSession({ tokens: null, error: null });
/** The call under way, or null. */
const lastCall = perSession(null);
/** What the server told of tokens that it generated for this page, by position. */
const logprobsOf = perSession([]);

/** A turn of this page has generated these tokens, as its `logprobs` tell, from position `first` on. */
export function noteLogprobs(id, first, logprobs = []) {
  const known = logprobsOf(id);
  known.value = known.value.slice(0, first);
  logprobs.forEach((each, index) => (known.value[first + index] = each));
}

/** Bytes of a character that one answer ends in the middle of belong to so many tokens at most. */
const SPLIT = 4;

/** Ask for it again, or only for what has come since, unless a call is under way. Of two calls the later one counts. */
export async function loadHistory(id, isGrowing = false) {
  const [history, last, mine] = [historyOf(id), lastCall(id), {}];
  if (sessionOf(id).peek() === null || (isGrowing && last.peek())) return;
  last.value = mine;
  const known = isGrowing ? history.peek().tokens.slice(0, -SPLIT) : [];
  try {
    const answer = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true, start: known.length } });
    if (last.peek() === mine) {
      logprobsOf(id).peek().splice(known.length + answer.pieces.length); // it may have been rewound
      history.value = { tokens: [...known, ...tokensOf(answer, known.length, logprobsOf(id).peek())], error: null };
    }
  } catch (error) {
    if (last.peek() === mine) history.value = { ...history.value, error };
  }
  if (last.peek() === mine) last.value = null;
}

/** Special tokens are told by their form; the API has no word for them. Neither for roles, which templates write in such
 * a token or behind one. */
const SPECIAL = /^<[^<>\s]+>$/;
const ROLE = /^(?:<\W*|<[^<>\s]+>)(system|user|assistant|tool|model)\b/;

const tokensOf = ({ token_ids, pieces }, start, logprobs) =>
  token_ids.map((id, index) => {
    const [text, found] = [pieces[index], logprobs[start + index]];
    const special = SPECIAL.test(text);
    const role = special && ROLE.exec(pieces.slice(index, index + 12).join(""))?.[1];
    return { id, text, special, role, chance: found?.token_id === id ? Math.exp(found.logprob ?? -Infinity) : null };
  });

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
