// The turn that this page runs in each session. It goes on while another screen is open.
import { signal } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { loadHistory } from "./history.js";

const turns = new Map();
const AT_REST = { running: false, sent: "", pieces: [], error: null };

/** The signal of it: `{running, sent, pieces, error}`. `sent` is what it was asked, `pieces` has `{ids, text}` of each
 * event since, and `error` is why the last one failed. */
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
    if (!heard.ended) throw new ApiError(0, { message: "The server went away during the turn." });
    await loadHistory(id);
    turn.value = AT_REST;
    return true;
  } catch (error) {
    await loadHistory(id);
    turn.value = { ...AT_REST, error };
    return false;
  }
}

/** Takes the events of a turn. The tokens of one frame are drawn together. */
function hearing(turn) {
  let fresh = [];
  const show = () => {
    if (turn.value.running) turn.value = { ...turn.value, pieces: [...turn.value.pieces, ...fresh] };
    fresh = [];
  };
  const heard = {
    ended: false,
    take: ({ name, data }) => {
      if (name === "error") throw new ApiError(200, data.error);
      heard.ended = name !== "token";
      if (heard.ended) return;
      if (fresh.length === 0) requestAnimationFrame(show);
      fresh.push({ ids: data.token_ids, text: data.text });
    },
  };
  return heard;
}
