// How large the window is, as far as the page is another one then.
import { signal } from "@preact/signals";

const PHONE = matchMedia("(max-width: 600px)");

/** As narrow as a phone. */
export const isPhone = signal(PHONE.matches);
PHONE.addEventListener("change", () => (isPhone.value = PHONE.matches));
