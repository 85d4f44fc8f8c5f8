// What the page knows by its key, and of each session. Whoever comes with another key must not see it.
import { batch, signal } from "@preact/signals";

const forgetting = [];
const stores = [];

/** Have `forget` called when another key is entered. */
export const forgetWithKey = (forget) => void forgetting.push(forget);

/** A signal that holds `initial` again when another key is entered. */
export function perKey(initial) {
  const kept = signal(initial);
  forgetWithKey(() => (kept.value = initial));
  return kept;
}

/** A function that answers the signal of a session by its id. It holds `initial` at first, and is forgotten with the
 * session. */
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
export const forget = (id) => stores.forEach((signals) => signals.delete(id));

export const forgetEverything = () => batch(() => forgetting.forEach((forget) => forget()));
