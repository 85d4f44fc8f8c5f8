// The time, for texts that tell how long ago something was.
import { signal } from "@preact/signals";

const TICKS = 5;

/** Unix seconds, each second anew. */
export const second = signal(Date.now() / 1000);
/** Unix seconds, every few seconds anew: for those of which there are many. */
export const now = signal(second.value);
let ticks = 0;
setInterval(() => {
  second.value = Date.now() / 1000;
  if ((ticks += 1) % TICKS === 0) now.value = second.value;
}, 1000);
