// A labelled control, with what the server said of it beside it.
import { html } from "../lib/html.js";

/** `control` is a function that gets what ties the control to the error. `error` is a text, or
 * null. */
export function Field({ id, label, error = null, wide = false, children, control }) {
  const told = error ? { "aria-invalid": "true", "aria-describedby": `${id}-error` } : {};
  return html`
    <div class=${wide ? "field wide" : "field"}>
      <label for=${id}>${label}</label>
      ${control({ id, name: id, ...told })} ${children}
      ${error && html`<p class="wrong" id="${id}-error" role="alert">${error}</p>`}
    </div>
  `;
}

/** What an error says of a field; `param` is the last part of the API's name for it. */
export function errorOf(error, param) {
  const parts = error?.param?.split(".") ?? [];
  return parts.includes(param) ? error.message.replace(/^[\w.]+: /, "") : null;
}

/** What an error says that is about none of these fields, or null. */
export const errorElse = (error, params) =>
  error && !params.some((param) => errorOf(error, param) !== null) ? error.message : null;
