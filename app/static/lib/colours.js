// The page's colours for canvases, which cannot read tokens of a stylesheet.
import { effect, signal } from "@preact/signals";
import { theme } from "../shell/theme.js";

/** Counts changes of the theme, for those who must draw anew. */
export const themeChanges = signal(0);
const changed = () => (themeChanges.value = themeChanges.peek() + 1);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
effect(() => (void theme.value, changed()));

const probe = document.createElement("i");
probe.hidden = true;
document.documentElement.append(probe);

/** A token such as "--device" as a colour of the theme that is on. */
export function colour(token) {
  probe.style.color = `var(${token})`;
  return getComputedStyle(probe).color;
}
