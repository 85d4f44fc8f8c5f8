// What the buttons do to the session's turn: begin it, go on with it, end it.
import { call, stream } from "../lib/api.js";

/** Begin a turn. `body` is that of `generate`. */
export const start = (desk, body) => run(desk, "generate", body);

/** Go on with a paused turn. `until` is that of `resume`: null goes on to the next breakpoint. `onToken` is that of
 * `follow`. */
export const resume = (desk, until = null, onToken) => run(desk, "resume", until === null ? {} : { until }, onToken);

/** End the turn. The session keeps what it has generated. */
export async function cancel(desk) {
  await call("POST", `/v1/sessions/${desk.id}/cancel`);
}

async function run(desk, verb, body, onToken) {
  const before = verb === "resume" ? desk.turn.peek().text : "";
  desk.turn.value = { running: true, verb, text: before, error: null };
  try {
    const end = await follow(`/v1/sessions/${desk.id}/${verb}`, body, (text, tokenIds) => {
      onToken?.(text, tokenIds);
      desk.turn.value = { ...desk.turn.peek(), text: desk.turn.peek().text + text };
    });
    desk.turn.value = { running: false, verb, text: end.text, error: null };
  } catch (error) {
    desk.turn.value = { ...desk.turn.peek(), running: false, error };
  }
}

/** Read a streamed turn. Tells `onToken(text, tokenIds)` of its tokens; the data of its last event. Throws the error
 * that the server answers, also in the midst of the stream. */
export async function follow(path, body, onToken) {
  let end = null;
  let refusal = null;
  const onEvent = ({ name, data }) => {
    if (name === "token") onToken(data.text, data.token_ids);
    else if (name === "error") refusal = data.error;
    else end = data;
  };
  await stream("POST", path, { body: { ...body, stream: true }, onEvent });
  if (end === null) throw Object.assign(new Error(refusal?.message ?? "The server ended the stream."), refusal);
  return end;
}
