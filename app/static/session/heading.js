// Which session this is, and how it is, at a glance.
import { html } from "../lib/html.js";
import { shortId } from "../lib/format.js";
import { linkTo } from "../state/route.js";
import { place } from "./events.js";

export const Heading = ({ view }) => html`
  <header class="heading">
    <h1 title=${view.id}>Session ${shortId(view.id)}</h1>
    <span class=${`chip state-${view.state}`}>${view.state}</span>
    <span class=${`chip phase-${view.phase}`}>phase ${view.phase}</span>
    <span class=${`chip tier-${view.kv.tier ?? "none"}`}>KV ${place(view.kv)}</span>
    ${Object.entries(view.metadata).map(([name, value]) => html`<span key=${name} class="chip">${name}: ${value}</span>`)}
    <a class="inside" href=${linkTo(view.id, "model")}>Inside the model</a>
  </header>
`;
