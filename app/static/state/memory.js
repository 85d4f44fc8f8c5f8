// The memory map, and how it was over the last minutes.
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

export function takeMemory(view, running) {
  const time = serverTime();
  memory.value = view;
  samples.value = [...samples.value.filter((each) => each.time > time - KEPT), { time, view, running }];
}
