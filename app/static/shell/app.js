// The frame around every screen.
import { html } from "../lib/html.js";
import { ModelScreen } from "../model/screen.js";
import { SessionScreen } from "../session/screen.js";
import { SessionsScreen } from "../sessions/screen.js";
import { connection } from "../state/connection.js";
import { route } from "../state/route.js";
import { ids, known, sessionOf } from "../state/sessions.js";
import { Header } from "./header.js";
import { Help } from "./help.js";
import { KeyForm } from "./key_form.js";
import { Notices } from "./notices.js";
import { Empty } from "./states.js";

export function App() {
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Header} />
    <main id="main" tabindex="-1"><${Screen} /></main>
    <${Notices} />
    <${Help} />
  `;
}

function Screen() {
  const { state, message } = connection.value;
  if (state === "key") return html`<${KeyForm} />`;
  if (state === "refused") return html`<${Empty} title="The server will not tell">${message}<//>`;
  if (!known.value) return html`<${Empty} title=${message}>Sessions appear here as soon as the server answers.<//>`;
  const { screen, id, part } = route.value;
  if (screen !== "sessions" || id === null) return html`<${SessionsScreen} />`;
  if (sessionOf(id).value === null) return html`<${Gone} id=${id} />`;
  return part === "model" ? html`<${ModelScreen} key=${id} id=${id} />` : html`<${SessionScreen} key=${id} id=${id} />`;
}

function Gone({ id }) {
  return html`<${Empty} title="There is no such session">
    ${id} is closed, or another tenant's. <a href="#/">See all ${ids.value.length} sessions</a>.
  <//>`;
}

/** The address is the screen's, so a link inside the page must not change it. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}
