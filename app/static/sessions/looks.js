// How a session looks: one word, icon and colour for what it is doing. Its state tells first, then its phase.

/** In the order of the legend. `key` is the word, the class of a cell, and its icon. */
export const LOOKS = [
  { key: "running", means: "a turn computes" },
  { key: "queued", means: "a turn waits for its first step" },
  { key: "paused", means: "a turn stands at a breakpoint" },
  { key: "compute", means: "no turn: its next call is near" },
  { key: "ready", means: "no turn: KV comes back for the next" },
  { key: "io_wait", means: "no turn: a tool runs" },
  { key: "idle", means: "no turn: gone for long" },
];
const BY_KEY = new Map(LOOKS.map((look) => [look.key, look]));

export const lookOf = ({ state, phase }) => BY_KEY.get(state === "idle" ? phase : state);

export const TIERS = ["device", "host", "disk"];
export const tierName = { device: "Device", host: "Host", disk: "Disk" };

/** What a filter calls the place of a session's KV. */
export function placeOf({ kv }) {
  if (kv.tier === null) return "none";
  return kv.tier.startsWith("to_") ? "moving" : kv.tier;
}

/** Bytes of KV in one tier. */
export const bytesIn = ({ kv }, tier) => kv[`${tier}_bytes`];

/** Bytes of a session's KV. A copy does not make it larger. */
export const bytesOf = (view) => Math.max(...TIERS.map((tier) => bytesIn(view, tier)));

/** Seconds until its client is back, by the client's own word; negative: late by so much. Null: it has not said. */
export const leftOf = ({ phase, returns_at: at }, time) => (at === null || phase !== "io_wait" ? null : at - time);

/** `name: value` of each label, after whether it is a fork: that has the labels of its origin. */
export const tagsOf = ({ metadata, forked_from: from }) =>
  [...(from ? ["fork"] : []), ...Object.entries(metadata).map(([name, value]) => `${name}: ${value}`)];
