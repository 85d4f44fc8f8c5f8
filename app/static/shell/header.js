// Which server this is, whether it is heard, and where one is on the page.
import { effect, signal } from "@preact/signals";
import { counted, nameOf } from "../lib/format.js";
import { html } from "../lib/html.js";
import { connection, enterKey, key, server } from "../state/connection.js";
import { memory } from "../state/memory.js";
import { EXPERIMENTS, HOME, linkTo, route } from "../state/route.js";
import { sessionOf } from "../state/sessions.js";
import { helping } from "./dialog.js";
import { Icon } from "./icons.js";

const THEMES = ["system", "light", "dark"];
const theme = signal("system");
export const nextTheme = () => (theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length]);
effect(() => (document.documentElement.style.colorScheme = theme.value.replace("system", "")));

export function Header() {
  return html`
    <header class="top">
      <a class="brand" href=${HOME}><img src="static/icon.svg" alt="" width="24" height="24" />Djinn</a>
      <nav aria-label="Screens"><${Places} /></nav>
      <${Figures} />
      <${Connection} />
      ${key.value && html`<button class="quiet" onClick=${() => enterKey("")}>Forget the key</button>`}
      <button class="quiet square" aria-label="Theme: ${theme.value}" title="Theme: ${theme.value}" onClick=${nextTheme}><${Icon} name=${theme.value} /></button>
      <button class="quiet square" aria-label="Keyboard help" aria-keyshortcuts="?" title="Keyboard help (?)" onClick=${() => (helping.value = true)}><${Icon} name="help" /></button>
    </header>
  `;
}

function Places() {
  const { screen, id, part } = route.value;
  const view = screen === "sessions" && id !== null ? sessionOf(id).value : null;
  const isExperiment = screen === "experiments";
  return html`
    <${Place} href=${HOME} here=${!view && !isExperiment}>Sessions<//>
    <${Place} href=${EXPERIMENTS} here=${isExperiment}>Experiments<//>
    ${view && html`<span class="within"><${Place} href=${linkTo(id)} here=${part !== "model"}><span class="hidden">Session </span><span class="ellipsis">${nameOf(view)}</span><//>
      <${Place} href=${linkTo(id, "model")} here=${part === "model"}>Inside the model<//></span>`}
  `;
}

const Place = ({ href, here, children }) => html`<a href=${href} aria-current=${here ? "page" : null}>${children}</a>`;

function Figures() {
  const about = server.value;
  const turns = memory.value;
  return html`<p class="figures">
    ${about && html`<span title="model, device and data type">${about.model} · ${about.device} · ${about.dtype}</span>`}
    ${turns && connection.value.state === "live" && html`<span>${counted(turns.turns_running, "turn")} running, ${turns.turns_waiting} waiting</span>`}
  </p>`;
}

const Connection = () => html`
  <p class="connection ${connection.value.state}" role="status">${connection.value.message}</p>
`;
