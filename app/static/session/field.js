// One field of a form, with what is wrong with it below.
import { html } from "../lib/html.js";

/** `error` is an `ApiError` or null; it is shown if it names this field. */
export const Field = ({ name, label, hint, value, onInput, error }) => html`
  <div class="field">
    <label for=${`field-${name}`}>${label}</label>
    <input ...${control({ name, hint, value, onInput, error })} inputmode="decimal" />
    <${Wrong} name=${name} error=${error} />
  </div>
`;

/** A field of several lines. */
export const Lines = ({ name, label, hint, value, onInput, error }) => html`
  <div class="field">
    <label for=${`field-${name}`}>${label}</label>
    <textarea rows="1" ...${control({ name, hint, value, onInput, error })} />
    <${Wrong} name=${name} error=${error} />
  </div>
`;

function control({ name, hint, value, onInput, error }) {
  const common = { id: `field-${name}`, name, value, placeholder: hint, autocomplete: "off", onInput: (event) => onInput(event.target.value) };
  return isWrong(error, name) ? { ...common, "aria-invalid": "true", "aria-describedby": `wrong-${name}` } : common;
}

export const Wrong = ({ name, error }) =>
  isWrong(error, name) && html`<span class="wrong" id=${`wrong-${name}`} role="alert">${error.message}</span>`;

/** Whether an error is about a field: `stop.0` is about `stop`. */
export const isWrong = (error, name) => error !== null && (error.param === name || Boolean(error.param?.startsWith(`${name}.`)));
