// The frame around every screen, and the start of the page.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ExperimentsScreen } from "../experiments/screen.js";
import { moment } from "../lib/clock.js";
import { counted, nameOf, shortId } from "../lib/format.js";
import { harmless, html } from "../lib/html.js";
import { ModelScreen } from "../model/screen.js";
import { SessionScreen } from "../session/screen.js";
import { Timeline } from "../session/timeline.js";
import { keepPage } from "../sessions/open.js";
import { SessionsScreen } from "../sessions/screen.js";
import { connection, enterKey, key } from "../state/connection.js";
import { dismiss, notices } from "../state/notices.js";
import { loadPast, pastOf } from "../state/happenings.js";
import { follow } from "../state/following.js";
import { route } from "../state/route.js";
import { ids, known, sessionOf } from "../state/sessions.js";
import { Header } from "./header.js";
import { CloseDialog, Help } from "./dialog.js";
import { Icon } from "./icons.js";
import { Empty } from "./controls.js";
import { Palette } from "./palette.js";

function App() {
  const place = useRef(null);
  useEffect(() => {
    // What had the focus may have gone with the screen before.
    if (place.current && document.activeElement === document.body) document.getElementById("main").focus();
    // A session is read from its top. The browser itself goes back to where the list was.
    if (place.current && route.value.id !== null) scrollTo(0, 0);
    place.current = route.value;
  }, [route.value]);
  const title = titleOf(route.value);
  useEffect(() => void (document.title = harmless(title)), [title]);
  useEffect(keepPage, []);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Header} />
    <main id="main" tabindex="-1"><${Screen} /></main>
    <${Notices} />
    <${CloseDialog} />
    <${Help} />
    <${Palette} />
  `;
}

function titleOf({ screen, id, part }) {
  if (screen === "experiments") return "Experiments · Djinn";
  if (screen !== "sessions" || id === null) return "Sessions · Djinn";
  const view = sessionOf(id).value;
  return `${view ? nameOf(view) : `Session ${shortId(id)}`}${part === "model" ? ", inside the model" : ""} · Djinn`;
}

function Screen() {
  const { state, message } = connection.value;
  if (state === "key") return html`<${KeyForm} />`;
  if (state === "refused") return html`<${Empty} title="The server will not tell">${message}<//>`;
  if (!known.value) return html`<${Empty} title=${message}>Sessions appear here as soon as the server answers.<//>`;
  const { screen, id, part } = route.value;
  if (screen === "experiments") return html`<${ExperimentsScreen} />`;
  if (screen !== "sessions" || id === null) return html`<${SessionsScreen} />`;
  if (sessionOf(id).value === null) return html`<${Gone} id=${id} />`;
  return part === "model" ? html`<${ModelScreen} key=${id} id=${id} />` : html`<${SessionScreen} key=${id} id=${id} />`;
}

/** Of a session that is closed there is what the server remembers. */
function Gone({ id }) {
  const { state } = connection.value;
  useEffect(() => void (id.startsWith("ses_") && loadPast(id).catch(() => {})), [id, state]); // it may know of none
  const [last] = pastOf(id).value.entries;
  return html`<${Empty} title=${last ? `${last.name ?? "Session"} …${shortId(id)} is closed` : "There is no such session"}>
    ${last ? `Since ${moment(last.at)}. Below is what the server remembers of ${id}.` : `${id} is closed, or another tenant's.`}
    ${" "}<a href="#/">See all ${counted(ids.value.length, "session")}</a>.
  <//>${last && html`<div class="session gone"><${Timeline} view=${{ id }} end=${last.at} /></div>`}`;
}

/** The address is the screen's, so a link inside the page must not change it. */
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function KeyForm() {
  const [read, setRead] = useState(null); // what was wrong, for one who types again
  const use = (event) => {
    event.preventDefault();
    enterKey(new FormData(event.target).get("key").trim());
  };
  return html`
    <section class="empty">
      <h1>A key, please</h1>
      <p id="why" role=${key.value ? "alert" : null}>${connection.value === read ? "\u00a0" : connection.value.message}</p>
      <form class="row" onSubmit=${use}>
        <label>API key <input name="key" type="password" autocomplete="off" required pattern=" *[!-~]+ *"
          title="A key has letters, digits and signs, without accents or spaces" aria-describedby="why"
          onInput=${() => setRead(connection.value)} /></label>
        <button class="primary">Use this key</button>
      </form>
      <p>The page keeps it in memory only: not in the address, not in the browser's storage.</p>
    </section>
  `;
}

const Notices = () => html`
  <ol class="notices" aria-label="Messages" aria-live="polite">
    ${notices.value.map(
      ({ id, kind, text }) => html`<li key=${id} class=${kind} role=${kind === "error" ? "alert" : null}>
        ${text} <button class="quiet" aria-label="Close this message" onClick=${() => dismiss(id)}><${Icon} name="close" /></button>
      </li>`,
    )}
  </ol>
`;

render(html`<${App} />`, document.getElementById("app"));
follow();
