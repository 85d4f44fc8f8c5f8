// Signals of each session, which are forgotten with it.
import { signal } from "@preact/signals";
import { forgetWithKey } from "./per_key.js";

const stores = [];

/** A function that answers the signal of a session by its id. It holds `initial` at first. */
export function perSession(initial) {
  const signals = new Map();
  stores.push(signals);
  forgetWithKey(() => signals.clear());
  return (id) => {
    if (!signals.has(id)) signals.set(id, signal(initial));
    return signals.get(id);
  };
}

/** The session is gone. */
export function forget(id) {
  for (const signals of stores) signals.delete(id);
}
