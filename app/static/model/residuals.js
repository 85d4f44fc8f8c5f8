// What was captured at one position, by layer.
import { download } from "../lib/api.js";
import { read } from "../lib/safetensors.js";
import { row } from "../lib/vectors.js";

/** A Map from layers to Float32Arrays. Where a position was captured more than once, the last time counts. */
export async function residualsAt(id, position) {
  const { metadata, tensors } = read((await download(`/v1/sessions/${id}/captures`)).bytes);
  const found = new Map();
  for (const [name, tensor] of tensors) {
    const { layer, positions } = JSON.parse(metadata[name]);
    const at = positions.indexOf(position);
    if (at >= 0) found.set(layer, row(tensor, at));
  }
  return found;
}
