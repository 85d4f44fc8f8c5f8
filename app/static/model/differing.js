// A vector from two prompts: the difference of what the model has of them after a layer.
import { call, download } from "../lib/api.js";
import { read } from "../lib/safetensors.js";
import { mean, minus, row } from "../lib/vectors.js";

/** A Float32Array: what `first` has after `layer`, minus what `second` has. `over` is "last" for the prompts' last
 * positions, "mean" for the means over all of them. The session that computes it is closed again. */
export async function difference({ first, second, layer, over }) {
  const { id } = await call("POST", "/v1/sessions", { body: { metadata: { purpose: "a vector from two prompts" } } });
  try {
    await call("POST", `/v1/sessions/${id}/breakpoints`, { body: { layer, action: "capture" } });
    const a = await residual(id, first, over);
    const b = await residual(id, second, over);
    return minus(a, b);
  } finally {
    await call("DELETE", `/v1/sessions/${id}`);
  }
}

/** Of one prompt in an empty session, which is empty again afterwards. A long prompt is captured in parts. */
async function residual(id, prompt, over) {
  await call("POST", `/v1/sessions/${id}/generate`, { body: { prompt, max_tokens: 0 } });
  const { bytes } = await download(`/v1/sessions/${id}/captures`);
  const parts = [...read(bytes).tensors.values()];
  await call("DELETE", `/v1/sessions/${id}/captures`);
  await call("POST", `/v1/sessions/${id}/rewind`, { body: { to_token: 0 } });
  const rows = parts.flatMap((part) => Array.from({ length: part.shape[0] }, (_, at) => row(part, at)));
  return over === "last" ? rows.at(-1) : mean(rows);
}
