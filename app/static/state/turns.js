// The turn that this page runs in each session. It goes on while another screen is open.
import { computed, signal } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { historyOf, loadHistory } from "./history.js";
import { perSession } from "./per_key.js";
import { sessionOf, stand } from "./sessions.js";

const AT_REST = { running: false, verb: null, sent: "", text: "", pieces: [], error: null, usage: null, promptEnd: 0, unsend: null };

/** The signal of it. `verb` is `generate` or `resume`, `sent` what the turn was asked, `text` what it has generated. While
 * it runs, `pieces` has `{ids, text}` of each event. `error` is why the last one failed, and `usage` what a paused turn has
 * cost. `unsend` is called if its prompt is lost: once it has paused, the history of a turn has at
 * least `promptEnd` tokens. */
export const turnOf = perSession(AT_REST);

/** Most turns of this tab at once. Each has a connection while it runs, and a browser has six for a server: two are for
 * other calls, one is the live stream's. */
const MOST = 3;
const under = signal(0);

/** Why this tab can begin or resume no turn now, or null. */
export const whyNoTurn = computed(() => (under.value < MOST ? null : `This tab runs ${MOST} turns, the most it can: wait for the end of one`));

/** Start a turn with a body of `generate`. `sent` is its text for people. True if it has ended or paused well. */
export const generate = (id, body, sent, unsend) => run(id, "generate", body, { sent, unsend });

/** Go on with a paused turn. `until` is that of `resume`: null goes on to the next breakpoint. `onPiece` is told of each
 * `{ids, text}`. */
export const resume = (id, until = null, onPiece = null) => run(id, "resume", until === null ? {} : { until }, { onPiece });

/** A snapshot has this view. If a turn is over since, nobody has told how: of a paused one the page must, unless it went on
 * with it. */
export function settle({ id, state, tokens }) {
  const before = sessionOf(id).peek();
  if (state !== "idle" || !before || before.state === "idle") return;
  const turn = turnOf(id);
  const { verb, usage, promptEnd, unsend } = turn.peek();
  if (before.checkpoint && (verb === null || usage)) turn.value = { ...turn.peek(), usage: null, error: LOST };
  if ((before.checkpoint || verb === "resume") && tokens < promptEnd) unsend?.();
}

/** End the turn, whoever started it. What it has generated stays. */
export const cancel = (id) => call("POST", `/v1/sessions/${id}/cancel`);

async function run(id, verb, body, { sent = "", unsend, onPiece }) {
  const turn = turnOf(id);
  if (turn.peek().running) return false;
  const error = whyNoTurn.peek() && new ApiError(0, { message: whyNoTurn.peek() });
  if (error) {
    turn.value = { ...turn.peek(), error };
    return false;
  }
  under.value += 1;
  const kept = verb === "resume" ? turn.peek() : { ...AT_REST, unsend };
  turn.value = { ...kept, running: true, verb, sent, error: null, usage: null };
  const drawn = drawing(turn);
  let rest;
  try {
    const end = await follow(`/v1/sessions/${id}/${verb}`, body, (piece) => (drawn.take(piece), onPiece?.(piece)));
    if (end.checkpoint) stand(id, end.checkpoint);
    const usage = end.status === "paused" ? end.usage : null;
    rest = { text: end.text, usage, promptEnd: usage?.prompt_tokens, unsend: usage && turn.peek().unsend };
  } catch (error) {
    rest = { error: error instanceof ApiError ? error : AWAY };
  }
  under.value -= 1;
  drawn.stop();
  // The history takes the place of the pieces where it is on the screen.
  if (sessionOf(id).peek() !== null && historyOf(id).peek().tokens !== null) await loadHistory(id);
  turn.value = { ...turn.peek(), running: false, pieces: [], ...rest };
  return !rest.error;
}

const LOST = new ApiError(0, {
  message: "The paused turn is over: it ended while this page did not hear the server. One that restarts loses such a turn.",
});
const AWAY = new ApiError(0, { message: "The server went away during the turn." });

/** Read a streamed turn; the data of its last event. */
async function follow(path, body, onPiece) {
  let end = null;
  const onEvent = ({ name, data }) => {
    if (name === "error") throw new ApiError(200, data.error);
    if (name === "token") onPiece({ ids: data.token_ids, text: data.text });
    else end = data;
  };
  await stream("POST", path, { body: { ...body, stream: true }, onEvent });
  if (end === null) throw AWAY;
  return end;
}

/** Shows the pieces of a turn, those of one frame together. */
function drawing(turn) {
  let [fresh, frame] = [[], null];
  const show = () => {
    const { pieces, text } = turn.peek();
    turn.value = { ...turn.peek(), pieces: [...pieces, ...fresh], text: text + fresh.map((each) => each.text).join("") };
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
