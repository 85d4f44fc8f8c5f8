// How a session looks: one word, icon and colour for what it is doing. Its turn tells first, then its phase.

/** In the order of the legend. `key` is the word, the class of a cell, and its icon; `of` is what it is a word of. */
export const LOOKS = [
  { key: "running", of: "turn", means: "it computes" },
  { key: "queued", of: "turn", means: "it waits for its first step" },
  { key: "paused", of: "turn", means: "it stands at a breakpoint" },
  { key: "compute", of: "phase", means: "its next call is near" },
  { key: "ready", of: "phase", means: "its KV comes back for the next call" },
  { key: "io_wait", of: "phase", means: "a tool runs" },
  { key: "idle", of: "phase", means: "gone for long" },
];
const BY_KEY = new Map(LOOKS.map((look) => [look.key, look]));
/** The words of turns, or of phases. */
export const looksOf = (kind) => LOOKS.flatMap(({ key, of }) => (of === kind ? [key] : []));

export const lookOf = ({ state, phase }) => BY_KEY.get(state === "idle" ? phase : state);
export const phaseOf = ({ phase }) => BY_KEY.get(phase);

export const TIERS = ["device", "host", "disk"];
export const tierName = { device: "Device", host: "Host", disk: "Disk" };

/** Bytes of KV in one tier. */
export const bytesIn = ({ kv }, tier) => kv[`${tier}_bytes`];

/** The place of a session's KV: the fastest that has some of it. */
export const placeOf = (view) => TIERS.find((tier) => bytesIn(view, tier) > 0) ?? "none";

/** Bytes of a session's KV. A copy does not make it larger. */
export const bytesOf = (view) => Math.max(...TIERS.map((tier) => bytesIn(view, tier)));

/** Seconds until its client is back, by the client's own word; negative: late by so much. Null: it has not said. */
export const leftOf = ({ phase, returns_at: at }, time) => (at === null || phase !== "io_wait" ? null : at - time);

/** `name: value` of each label, after whether it is a fork: that has the labels of its origin. */
export const tagsOf = ({ metadata, forked_from: from }) =>
  [...(from ? ["fork"] : []), ...Object.entries(metadata).map(([name, value]) => `${name}: ${value}`)];
