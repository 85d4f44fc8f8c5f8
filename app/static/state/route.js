// Which screen is open. It is in the address after `#`, so that the browser's buttons and links work.
import { signal } from "@preact/signals";

/** The part as it is where it is no escaped text. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const read = () => {
  const [screen = "", id = null, part = null] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  return { screen, id, part };
};

/** `screen` is "" for all sessions, "sessions" with an `id` for one; `part` is "model" for the inside of the model. Of
 * "experiments" the `id` is the form, as JSON. */
export const route = signal(read());
addEventListener("hashchange", () => (route.value = read()));

export const linkTo = (id, part = null) => `#/sessions/${encodeURIComponent(id)}${part ? `/${part}` : ""}`;
export const HOME = "#/";
export const EXPERIMENTS = "#/experiments";
export const experimentLink = (form) => `${EXPERIMENTS}/${encodeURIComponent(JSON.stringify(form))}`;

/** At once, so that nothing of the screen before is drawn again. */
export function go(link) {
  location.hash = link;
  route.value = read();
}

/** The same screen has another address now. */
export const replace = (link) => history.replaceState(null, "", link);
