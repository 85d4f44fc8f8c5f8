// The theme, and its colours for canvases, which cannot read tokens of a stylesheet.
import { effect, signal } from "@preact/signals";

const THEMES = ["system", "light", "dark"];
export const theme = signal("system");
export const nextTheme = () => (theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]);

effect(() => (document.documentElement.dataset.theme = theme.value));

/** Counts changes of the theme, for those who must draw anew. */
export const themeChanges = signal(0);
const known = new Map();
const changed = () => (known.clear(), (themeChanges.value = themeChanges.peek() + 1));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
effect(() => (void theme.value, changed()));

const probe = document.createElement("i");
probe.hidden = true;
document.documentElement.append(probe);

/** A token such as "--device" as a colour of the theme that is on. To ask the browser costs a look at all styles. */
export function colour(token) {
  if (!known.has(token)) {
    probe.style.color = `var(${token})`;
    known.set(token, getComputedStyle(probe).color);
  }
  return known.get(token);
}
