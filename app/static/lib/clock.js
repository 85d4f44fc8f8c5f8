// The time, for texts that tell how long ago something was.
import { signal } from "@preact/signals";

const TICK_MS = 5000;

/** Unix seconds, every few seconds anew. */
export const now = signal(Date.now() / 1000);
setInterval(() => (now.value = Date.now() / 1000), TICK_MS);
