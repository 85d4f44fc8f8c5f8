// Which screen is open. It is in the address after `#`, so that the browser's buttons and links work.
import { effect, signal, untracked } from "@preact/signals";

/** The part as it is where it is no escaped text. */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const read = () => {
  const [screen = "", id = null, part = null] = location.hash.split("?")[0].replace(/^#\/?/, "").split("/").map(decode);
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

/** Whether one still looks inside the model of this session. */
export const isInside = (id) => route.peek().id === id && route.peek().part === "model";

/** At once, so that nothing of the screen before is drawn again. */
export function go(link) {
  location.hash = link;
  route.value = read();
}

/** The same screen has another address now. */
export const replace = (link) => history.replaceState(null, "", link);

/** What the address says behind "?": what is looked at on the screen. A link to it shows the same. */
const asked = () => new URLSearchParams(location.hash.split("?")[1]);

/** Has `take` read it, now and whenever one enters another address of this screen, until the function that this answers is called. */
export function heed(take) {
  const { id, part } = route.peek();
  return effect(() => {
    const now = route.value;
    if (now.id === id && now.part === part) untracked(() => take(asked()));
  });
}

/** Have the address say these too; what is empty is left out. */
export function tell(values) {
  const all = asked();
  for (const [name, value] of Object.entries(values)) value ? all.set(name, value) : all.delete(name);
  const link = (location.hash.split("?")[0] || HOME) + (all.size ? `?${all}` : "");
  if (link !== (location.hash || HOME)) replace(link);
}

/** A form that an address holds as JSON, with the fields of `first`; null where it is none. */
export function formIn(text, first) {
  try {
    const kept = JSON.parse(text);
    const isAlike = ([name, value]) => kept[name] === undefined || (typeof kept[name] === typeof value && Array.isArray(kept[name]) === Array.isArray(value));
    return Object.entries(first).every(isAlike) ? { ...first, ...kept } : null;
  } catch {
    return null;
  }
}
