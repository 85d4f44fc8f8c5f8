// A button that says why it does nothing now.
import { html } from "../lib/html.js";

/** `why` is the reason for which it cannot be used now, or null. It keeps the focus then, so that a keyboard does not
 * lose its place while a turn runs. */
export const Button = ({ why = null, title = null, onClick, children, ...rest }) => html`
  <button
    type="button"
    ...${rest}
    title=${why ?? title}
    aria-disabled=${why ? "true" : null}
    onClick=${(event) => (why ? event.preventDefault() : onClick?.(event))}
  >
    ${children}
  </button>
`;
