// The turn that this page runs in each session. It goes on while another screen is open.
import { computed, signal } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { serverTime } from "../lib/clock.js";
import { counted } from "../lib/format.js";
import { FIRST_WAIT_MS, LONGEST_WAIT_MS } from "./connection.js";
import { historyOf, loadHistory, noteLogprobs } from "./history.js";
import { perSession } from "./per_key.js";
import { where } from "./points.js";
import { sessionOf, stand } from "./sessions.js";

const AT_REST = { running: false, verb: null, sent: "", text: "", pieces: [], error: null, over: null, usage: null, asked: null, began: 0, from: 0 };

/** The signal of it. `verb` is `generate` or `resume`, `sent` what the turn was asked, `text` what it has generated. While
 * it runs, `pieces` has `{ids, text, chance}` of each event. `error` is why the last one failed. `over` says what became of a pause
 * that ended unheard. `usage` is what a paused turn has cost. `asked` is `{text, from, tell}`: the prompt, and the history's
 * length before it. `tell` is told whether the history has it, and answers whether this has changed its field. `began` is when it was sent, and the history had `from` tokens then. */
export const turnOf = perSession(AT_REST);

/** Most turns of this tab at once. Each has one of a browser's six connections: two are for other calls, one for the live
 * stream. */
const MOST = 3;
const under = signal(0);

/** Why this tab can begin or resume no turn now, or null. */
export const whyNoTurn = computed(() => (under.value < MOST ? null : `This tab runs ${MOST} turns, the most it can: wait for the end of one`));

/** Start a turn with a body of `generate`. `sent` is its text for people, `tell` that of `asked`. */
export const generate = (id, body, sent, tell) => run(id, "generate", body, { sent, tell });

/** Go on with a paused turn. `until` is that of `resume`: null goes on to the next breakpoint. `onPiece` is told of each
 * `{ids, text}`. */
export const resume = (id, until = null, onPiece) => run(id, "resume", until === null ? {} : { until }, { onPiece });

/** A snapshot has this view. If a pause is over since, nobody has told how: the page must, unless it went on with it. */
export async function settle(view) {
  const { id, state, tokens } = view;
  const [turn, before] = [turnOf(id), sessionOf(id).peek()];
  const { running, verb, usage, asked } = turn.peek();
  if (running || state !== "idle" || !before?.checkpoint) return;
  const { message } = interrupted(view) ?? { message: UNHEARD + lost(before.tokens - tokens) + kept(tokens) };
  const over = (verb === null || usage) && { message, at: view.used_at };
  turn.value = { ...turn.peek(), usage: null, asked: null, over };
  const said = await fate(id, asked);
  if (over && turn.peek().over === over) turn.value = { ...turn.peek(), over: { ...over, message: message + said } };
}

const UNHEARD = "The paused turn is over: it ended while this page did not hear the server.";

/** What to say of a turn that a restart has ended, as any client can read it until the next one begins. */
const interrupted = ({ interrupted_turn: turn, tokens }) =>
  turn && { message: `A restart of the server ended the turn, which was paused ${where(turn.point, [turn.layer])}.` + lost(turn.tokens_lost) + kept(tokens) };

/** What to say of a session's last turn, if it ended as nobody wanted. */
export function overOf(view) {
  const { over } = turnOf(view.id).value;
  return over && over.at === view.used_at && !view.checkpoint ? over : interrupted(view);
}

const lost = (count) => (count > 0 ? ` Lost with it: ${counted(count, "token")}.` : "");
const kept = (now) => ` Kept: ${counted(now, "token")}.`;

/** Have it told whether the history has the prompt, in doubt not; what there is to say of that. */
async function fate(id, asked) {
  if (!asked?.tell) return "";
  const history = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } }).catch(() => null);
  const isThere = history?.pieces.slice(asked.from).join("").includes(asked.text);
  if (!asked.tell(isThere)) return "";
  return isThere ? " The session has the prompt." : " The prompt is in its field again.";
}

/** End the turn, whoever started it. What it has generated stays. */
export const cancel = (id) => call("POST", `/v1/sessions/${id}/cancel`);

async function run(id, verb, body, { sent = "", tell, onPiece }) {
  const turn = turnOf(id);
  if (turn.peek().running) return;
  const message = whyNoTurn.peek();
  if (message) {
    turn.value = { ...turn.peek(), error: new ApiError(0, { message }) };
    return;
  }
  under.value += 1;
  const before = verb === "resume" ? turn.peek() : { ...AT_REST, began: serverTime() };
  const its = before.asked ?? { tell, text: sent.trim(), from: sessionOf(id).peek()?.tokens };
  const from = historyOf(id).peek().tokens?.length ?? sessionOf(id).peek()?.tokens;
  turn.value = { ...before, from, running: true, verb, sent, error: null, over: null, usage: null, asked: its };
  const drawn = byFrame(showIn(turn));
  let rest;
  const asked = performance.now();
  try {
    const end = await follow(`/v1/sessions/${id}/${verb}`, body, (piece) => (drawn.take(piece), onPiece?.(piece)));
    noteLogprobs(id, end.usage.prompt_tokens, end.logprobs);
    if (end.checkpoint) stand(id, end.checkpoint);
    const usage = end.status === "paused" ? end.usage : null;
    tell?.(true);
    rest = { text: end.text, usage, asked: usage && its };
  } catch (error) {
    rest = { error: error instanceof ApiError ? Object.assign(error, { asked }) : AWAY };
  }
  under.value -= 1;
  drawn.stop();
  if (rest.error) rest = await learn(id, turn, before, rest.error);
  // The history takes the place of the pieces where it is on the screen.
  if (sessionOf(id).peek() !== null && historyOf(id).peek().tokens !== null) await loadHistory(id);
  turn.value = { ...turn.peek(), running: false, pieces: [], ...rest };
}

const AWAY = new ApiError(0, { message: "The server went away during the turn." });

/** A turn has failed. What else there is to know of it, as soon as it runs no more. A refused one is as it was before. */
async function learn(id, turn, before, error) {
  turn.value = { ...turn.peek(), error };
  const had = sessionOf(id).peek()?.tokens;
  const isRefused = error.status >= 400 && error.status < 500;
  const view = isRefused ? null : await atRest(id);
  if (view === null) return { ...before, error };
  const gone = lost(had - view.tokens);
  const said = (gone && gone + kept(view.tokens)) + (await fate(id, turn.peek().asked));
  return { ...(view.checkpoint ? { verb: null } : { asked: null }), error: said ? new ApiError(0, { message: error.message + said }) : error };
}

/** The session, as soon as the server is there and no turn is under way; null if it does not tell. */
async function atRest(id) {
  for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    try {
      const view = await call("GET", `/v1/sessions/${id}`);
      if (view.state === "idle" || view.state === "paused") return view;
    } catch ({ status }) {
      if (!(status === 0 || status >= 500)) return null;
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

/** Read a streamed turn; the data of its last event. */
async function follow(path, body, onPiece) {
  let end = null;
  const onEvent = ({ name, data }) => {
    if (name === "error") throw new ApiError(200, data.error);
    if (name === "token") onPiece({ ids: data.token_ids, text: data.text, chance: chanceOf(data.logprobs) });
    else end = data;
  };
  await stream("POST", path, { body: { ...body, stream: true }, onEvent });
  if (end === null) throw AWAY;
  return end;
}

/** Of the least probable token; null where none was asked for. */
const chanceOf = (logprobs) => (logprobs?.length ? Math.exp(Math.min(...logprobs.map((each) => each.logprob ?? -Infinity))) : null);

/** Shows some more pieces of a turn. */
const showIn = (turn) => (fresh) => {
  const { pieces, text } = turn.peek();
  turn.value = { ...turn.peek(), pieces: [...pieces, ...fresh], text: text + fresh.map((each) => each.text).join("") };
};

/** Gives what is taken to `draw`, that of one frame together. */
export function byFrame(draw) {
  let [fresh, frame] = [[], null];
  const show = () => {
    draw(fresh);
    [fresh, frame] = [[], null];
  };
  return {
    take: (piece) => {
      fresh.push(piece);
      frame ??= requestAnimationFrame(show);
    },
    stop: () => {
      if (frame === null) return;
      cancelAnimationFrame(frame);
      show();
    },
  };
}
