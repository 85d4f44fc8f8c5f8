// One field of a form, with what the server says of it below.
import { html } from "../lib/html.js";

/** `error` is an `ApiError` or null; it is shown if it names this field. */
export function Field({ name, label, hint = "", value, onInput, error }) {
  const wrong = error !== null && names(error, name);
  return html`
    <label class="field">
      <span>${label}</span>
      <input
        name=${name} value=${value} placeholder=${hint} autocomplete="off" inputmode="decimal"
        aria-invalid=${wrong ? "true" : null} aria-describedby=${wrong ? `wrong-${name}` : null}
        onInput=${(event) => onInput(event.target.value)}
      />
      ${wrong && html`<${Wrong} name=${name} error=${error} />`}
    </label>
  `;
}

/** A field of several lines. */
export function Lines({ name, label, hint, value, error, onInput }) {
  const wrong = error !== null && names(error, name);
  return html`
    <label class="field wide">
      <span>${label}</span>
      <textarea
        rows="1" value=${value} placeholder=${hint} aria-invalid=${wrong ? "true" : null}
        aria-describedby=${wrong ? `wrong-${name}` : null} onInput=${(event) => onInput(event.target.value)}
      />
      ${wrong && html`<${Wrong} name=${name} error=${error} />`}
    </label>
  `;
}

export const Wrong = ({ name, error }) => html`<span class="wrong" id=${`wrong-${name}`} role="alert">${error.message}</span>`;

/** Whether an error is about a field: `stop.0` is about `stop`. */
export const names = (error, name) => error.param === name || Boolean(error.param?.startsWith(`${name}.`));
