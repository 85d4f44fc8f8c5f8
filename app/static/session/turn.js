// The turn that this page runs in each session. It goes on while another screen is open.
import { signal } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { loadHistory } from "./history.js";

const turns = new Map();
const AT_REST = { running: false, sent: "", pieces: [], error: null, usage: null };

/** The signal of it: `{running, sent, pieces, error, usage}`. `sent` is what it was asked, `pieces` has `{ids, text}` of
 * each event since, `error` is why the last one failed, and `usage` what it has cost so far where it is paused. */
export function turnOf(id) {
  if (!turns.has(id)) turns.set(id, signal(AT_REST));
  return turns.get(id);
}

/** Start a turn with a body of `generate`. `sent` is its text for people. True if it has ended or paused well. */
export const generate = (id, body, sent) => run(id, "generate", body, sent);

/** Go on with a paused turn; `until` is "end", or null for the next breakpoint. */
export const resume = (id, until) => run(id, "resume", until ? { until } : {}, "");

/** End the turn, whoever started it. What it has generated stays. */
export const cancel = (id) => call("POST", `/v1/sessions/${id}/cancel`);

async function run(id, action, body, sent) {
  const turn = turnOf(id);
  turn.value = { ...AT_REST, running: true, sent };
  const heard = hearing(turn);
  try {
    await stream("POST", `/v1/sessions/${id}/${action}`, { body: { ...body, stream: true }, onEvent: heard.take });
    if (heard.end === null) throw new Error("the stream has no end");
    heard.isOver = true;
    await loadHistory(id);
    turn.value = { ...AT_REST, usage: heard.end.status === "paused" ? heard.end.usage : null };
    return true;
  } catch (error) {
    heard.isOver = true;
    await loadHistory(id);
    turn.value = { ...AT_REST, error: error instanceof ApiError ? error : AWAY };
    return false;
  }
}

const AWAY = new ApiError(0, { message: "The server went away during the turn." });

/** Takes the events of a turn. The tokens of one frame are drawn together. */
function hearing(turn) {
  let fresh = [];
  const show = () => {
    if (!heard.isOver) turn.value = { ...turn.value, pieces: [...turn.value.pieces, ...fresh] };
    fresh = [];
  };
  const heard = {
    end: null,
    isOver: false,
    take: ({ name, data }) => {
      if (name === "error") throw new ApiError(200, data.error);
      if (name !== "token") {
        heard.end = data;
        return;
      }
      if (fresh.length === 0) requestAnimationFrame(show);
      fresh.push({ ids: data.token_ids, text: data.text });
    },
  };
  return heard;
}
