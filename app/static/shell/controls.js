// Buttons that say why they do nothing now, and fields that say what is wrong with their values.
import { html } from "../lib/html.js";
import { AWAY, isAway } from "../state/connection.js";

/** `why` is the reason for which it cannot be used now, or null; without the server none can. It keeps the focus then, so
 * that a keyboard does not lose its place while a turn runs. */
export function Button({ why = null, title = null, onClick, children, ...rest }) {
  why ??= isAway() ? AWAY : null;
  return html`
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
}

/** `control` is a function that gets what ties the control to its label and its error. `error` is a text, or null. */
export function Field({ id, label, name = id, error = null, wide = false, children, control }) {
  return html`
    <div class=${wide ? "field wide" : "field"}>
      <label for=${id}>${label}</label>
      ${control({ id, name, ...told(id, error) })} ${children}
      <${Wrong} id=${id} error=${error} />
    </div>
  `;
}

/** What ties a control to the error that `Wrong` shows. */
export const told = (id, error) => (error ? { "aria-invalid": "true", "aria-describedby": `${id}-error` } : {});

export const Wrong = ({ id, error }) => error && html`<p class="wrong" id=${`${id}-error`} role="alert">${error}</p>`;

/** Whether an error is about a field: it is one part of the API's name for it, as in `stop.0` or `edits.0.factor`. */
export const isAbout = (error, name) => Boolean(error?.param?.split(".").includes(name));

/** What an error says of a field, without the field's name; null if it is about another. */
export const errorOf = (error, name) => (isAbout(error, name) ? error.message.replace(/^[\w.]+: /, "") : null);

/** An error that is about none of these fields, or null. */
export const errorElse = (error, names) => (names.some((name) => isAbout(error, name)) ? null : error);
