// Messages at the edge of the page.
import { html } from "../lib/html.js";
import { dismiss, notices } from "../state/notices.js";

export const Notices = () => html`
  <ol class="notices" aria-label="Messages" aria-live="polite">
    ${notices.value.map(
      ({ id, kind, text }) => html`<li key=${id} class=${kind} role=${kind === "error" ? "alert" : null}>
        ${text} <button class="quiet" aria-label="Close this message" onClick=${() => dismiss(id)}>✕</button>
      </li>`,
    )}
  </ol>
`;
