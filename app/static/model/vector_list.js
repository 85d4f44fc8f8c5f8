// The caller's named vectors.
import { call, upload } from "../lib/api.js";
import { writeVector } from "../lib/safetensors.js";
import { perKey } from "../state/per_key.js";

/** `{name, size, dtype, norm}`, by name; null before the first answer. */
export const vectors = perKey(null);

/** Why the last try to read them failed, or null. */
export const vectorsError = perKey(null);

export async function refreshVectors() {
  try {
    vectors.value = (await call("GET", "/v1/vectors")).data;
    vectorsError.value = null;
  } catch (error) {
    vectorsError.value = error;
  }
}

/** Keep a vector under a name: a Float32Array, or the bytes of a safetensors file. */
export async function keepVector(name, content) {
  const bytes = content instanceof Float32Array ? writeVector("vector", content) : content;
  await upload("POST", "/v1/vectors", bytes, { query: { name } });
  await refreshVectors();
}

export async function deleteVector(name) {
  await call("DELETE", `/v1/vectors/${encodeURIComponent(name)}`);
  await refreshVectors();
}
