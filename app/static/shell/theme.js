// Light, dark, or as the system says.
import { effect, signal } from "@preact/signals";

const THEMES = ["system", "light", "dark"];
export const theme = signal("system");
export const nextTheme = () => (theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]);

effect(() => (document.documentElement.dataset.theme = theme.value));
