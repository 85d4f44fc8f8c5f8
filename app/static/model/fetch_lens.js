// Reads the lens of a range of positions from the server.
import { call } from "../lib/api.js";

const TRIES = 6;

/** A Map from positions in `[first, end)` to `{position, tokenId, text, rows}`, where `rows` is a Map from layers to
 * the `count` best tokens, `{tokenId, text, p}`: without a layer whose residual stream is not kept there. `p` is NaN
 * where that is not finite. */
export async function fetchLens(id, first, end, layers, count) {
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
