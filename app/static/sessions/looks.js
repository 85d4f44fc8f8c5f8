// How a session looks: one glyph, colour and word for what it is doing. Its state tells first, then its phase.
import { memory } from "../state/memory.js";

/** In the order of the legend. `key` is also the class of a cell. */
export const LOOKS = [
  { key: "running", glyph: "▶", word: "running", means: "a turn computes" },
  { key: "queued", glyph: "…", word: "queued", means: "a turn waits for its first step" },
  { key: "paused", glyph: "‖", word: "paused", means: "a turn stands at a breakpoint" },
  { key: "compute", glyph: "○", word: "at hand", means: "no turn; phase compute" },
  { key: "ready", glyph: "△", word: "called back", means: "no turn; phase ready" },
  { key: "io_wait", glyph: "◔", word: "waiting", means: "no turn; phase io_wait: a tool runs" },
  { key: "idle", glyph: "–", word: "away", means: "no turn; phase idle: gone for long" },
];
const BY_KEY = new Map(LOOKS.map((look) => [look.key, look]));

export const lookOf = ({ state, phase }) => BY_KEY.get(state === "idle" ? phase : state);

export const TIERS = ["device", "host", "disk"];
const FIELDS = { device: "device_bytes", host: "host_bytes", disk: "disk_bytes" };
export const tierName = { device: "Device", host: "Host", disk: "Disk" };

/** What a filter calls the place of a session's KV. */
export function placeOf({ kv, state }) {
  if (state === "running") return "device";
  if (kv.tier === null) return "none";
  return kv.tier.startsWith("to_") ? "moving" : kv.tier;
}

/** Bytes of KV in one tier. The server counts those of a turn when it ends; while it runs they follow from its tokens. */
export function bytesIn({ kv, state, tokens }, tier) {
  const told = kv[FIELDS[tier]];
  return tier === "device" && state === "running" ? Math.max(told, bytesOfTokens(tokens)) : told;
}

/** Bytes of KV in all tiers; a copy counts too, because it takes room. */
export const bytesOf = (view) => TIERS.reduce((sum, tier) => sum + bytesIn(view, tier), 0);

function bytesOfTokens(tokens) {
  const { block_tokens: length, block_bytes: size } = memory.peek()?.data ?? { block_tokens: 1, block_bytes: 0 };
  return Math.ceil(tokens / length) * size;
}

/** `name: value` of each label, after whether it is a fork: that has the labels of its origin. */
export const tagsOf = ({ metadata, forked_from: from }) =>
  [...(from ? ["fork"] : []), ...Object.entries(metadata).map(([name, value]) => `${name}: ${value}`)];
