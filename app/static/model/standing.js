// Where the session's turn stands now.
import { useEffect, useState } from "preact/hooks";
import { counted, seconds, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { server } from "../state/connection.js";
import { linkTo } from "../state/route.js";

export function Standing({ desk }) {
  const view = desk.session.value;
  return html`
    <header class="standing">
      <h1>Inside the model</h1>
      <a href=${linkTo(desk.id)} class="mono" title=${desk.id}>${shortId(desk.id)}</a>
      <p role="status"><${Place} view=${view} /></p>
      ${view.checkpoint && html`<${TimeLeft} at=${view.checkpoint.expires_at} />`}
    </header>
  `;
}

function Place({ view }) {
  const { state, checkpoint, tokens } = view;
  if (!checkpoint) return html`<strong class="state ${state}">${state}</strong> ${counted(tokens, "token")}`;
  const { layer, first, end, pass } = checkpoint;
  return html`
    <strong class="state paused">paused</strong> after layer ${layer} of ${server.value.num_layers - 1}, ${pass} of
    ${end - first === 1 ? ` position ${first}` : ` positions ${first} to ${end - 1}`}
  `;
}

/** A pause ends by itself: people should not be surprised. */
function TimeLeft({ at }) {
  const [now, setNow] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  if (at === null) return null;
  return html`<p class="dim left">The pause ends by itself in ${seconds(Math.max(1, Math.floor(at - now)))}.</p>`;
}
