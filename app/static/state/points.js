// The points inside a layer: which the model has, and how people say where one is.
import { call } from "../lib/api.js";
import { perKey } from "./per_key.js";

export const AFTER = "resid_post";
/** Where the residual stream itself stands, so that a lens can read it. */
export const STREAM = ["embed", "resid_pre", "resid_mid", AFTER];

/** What `/v1/points` lists; empty before the first answer. */
export const points = perKey([]);

export async function loadPoints() {
  if (points.peek().length === 0) points.value = (await call("GET", "/v1/points")).data;
}

/** The entry of a point in a layer, or undefined: a point may have another shape in other layers. */
export const pointIn = (layer, point) =>
  points.value.find(({ name, layers }) => name === point && (layers === null || layers.includes(layer)));

/** Layers, and the point in them, in words. */
export function where(point, layers) {
  const [first, last] = [layers[0], layers.at(-1)];
  const isRun = layers.length > 2 && last - first === layers.length - 1;
  const shown = `layer${layers.length > 1 ? "s" : ""} ${isRun ? `${first} to ${last}` : layers.join(", ")}`;
  return point === AFTER ? `after ${shown}` : `at ${point} of ${shown}`;
}

const PARTS = { mlp_pre: "neurons", mlp_post: "neurons", router_logits: "experts", experts: "experts" };

/** What edits of a point may choose a part from: `heads`, `neurons` or `experts`; null: there is no such part. */
export const partOf = (entry) => PARTS[entry?.name] ?? (entry?.heads && !entry.no_edit ? "heads" : null);
