// The one figure that this page reads of the server's metrics.
import { download } from "../lib/api.js";

/** Tokens that the server has computed since its start. Throws `ApiError` where the caller may not read the metrics. */
export async function tokensComputed() {
  const text = new TextDecoder().decode((await download("/metrics")).bytes);
  return Number(/^djinn_step_tokens_total (\S+)$/m.exec(text)?.[1] ?? 0);
}
