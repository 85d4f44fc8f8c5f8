// The memory map, and how it was over the last minutes.
import { signal } from "@preact/signals";

/** Seconds of history, one sample each. */
export const KEPT = 600;
/** The newest `MemoryView`; null before the first. */
export const memory = signal(null);
/** Samples, oldest first: `{time, view}`, with `time` in Unix seconds. A new array each second. */
export const samples = signal([]);

export function forgetMemory() {
  memory.value = null;
  samples.value = [];
}

export function takeMemory(view) {
  memory.value = view;
  const last = samples.value.length >= KEPT ? samples.value.slice(1 - KEPT) : samples.value;
  samples.value = [...last, { time: Date.now() / 1000, view }];
}
