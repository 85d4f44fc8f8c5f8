// What the page knows by its key. Whoever comes with another key must not see it.
import { batch, signal } from "@preact/signals";

const forgetting = [];

/** Have `forget` called when another key is entered. */
export const forgetWithKey = (forget) => void forgetting.push(forget);

/** A signal that holds `initial` again when another key is entered. */
export function perKey(initial) {
  const kept = signal(initial);
  forgetWithKey(() => (kept.value = initial));
  return kept;
}

export const forgetEverything = () => batch(() => forgetting.forEach((forget) => forget()));
