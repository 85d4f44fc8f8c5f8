// The memory map, and how it was over the last minutes.
import { call } from "../lib/api.js";
import { serverTime } from "../lib/clock.js";
import { perKey } from "./per_key.js";

/** Seconds of history, one sample each. */
const KEPT = 600;
/** The newest `MemoryView`; null before the first. */
export const memory = perKey(null);
/** The newest `FindingsView`. */
export const findings = perKey({ data: [], capacity: null });
/** Samples, oldest first: `{time, view, running}`, with `time` in Unix seconds, and the ids of the sessions that ran. */
export const samples = perKey([]);

/** Of today: `{recomputed, wait, cause}`, tokens, and the longest wait of a first token in ms, with what for if that was told. */
export const today = perKey(null);

export async function loadToday() {
  const since = new Date(1000 * serverTime()).setHours(0, 0, 0, 0) / 1000;
  const { minutes } = await call("GET", "/v1/activity", { query: { since } });
  const of = (name) => minutes.map((each) => each[name]);
  today.value = { recomputed: of("tokens_recomputed").reduce((sum, each) => sum + each, 0), wait: Math.max(0, ...of("worst_ms")) };
}

/** A turn that is over counts. */
export function takeTurn({ usage, resume_ms: waits }) {
  if (!usage || !today.value) return;
  const parts = Object.entries(waits).sort(([, one], [, other]) => other - one);
  const wait = parts.reduce((sum, [, each]) => sum + each, 0);
  const recomputed = today.value.recomputed + usage.tokens_recomputed;
  today.value = { ...today.value, recomputed, ...(wait > today.value.wait && { wait, cause: parts[0][0] }) };
}

export function takeMemory(view, running) {
  const time = serverTime();
  memory.value = view;
  samples.value = [...samples.value.filter((each) => each.time > time - KEPT), { time, view, running }];
}
