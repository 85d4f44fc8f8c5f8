// The screen of one session.
import { html } from "../lib/html.js";
import { sessionOf } from "../state/sessions.js";
import { Actions } from "./actions.js";
import { Breakpoints } from "./breakpoints.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { Facts } from "./facts.js";
import { Foreign, isForeign } from "./foreign.js";
import { Forks } from "./forks.js";
import { Heading } from "./heading.js";
import { PauseBanner } from "./pause_banner.js";
import { Timeline } from "./timeline.js";

export function SessionScreen({ id }) {
  const view = sessionOf(id).value;
  const foreign = isForeign(view);
  return html`
    <div class="session">
      <${Heading} view=${view} />
      ${view.checkpoint && html`<${PauseBanner} view=${view} />`}
      <div class="talk stack">
        ${foreign ? html`<${Foreign} view=${view} />` : html`<${Conversation} view=${view} /><${Composer} view=${view} />`}
      </div>
      <div class="side stack">
        ${!foreign && html`<${Actions} view=${view} />`}
        <${Facts} view=${view} />
        ${!foreign && html`<${Breakpoints} view=${view} />`}
        <${Forks} view=${view} />
      </div>
      <${Timeline} view=${view} />
    </div>
  `;
}
