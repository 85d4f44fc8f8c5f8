// The fields that say how a turn chooses its tokens and where it ends, with what is wrong below each.
import { html } from "../lib/html.js";
import { FIELDS } from "./draft.js";

const MAIN = FIELDS.filter((each) => each.main);
const REST = FIELDS.filter((each) => !each.main);
const HIDDEN = [...REST.map((each) => each.name), "ignore_eos", "other"];

export function Settings({ draft, change, error }) {
  const field = ({ name, label, hint }) => html`<${Field}
    key=${name} name=${name} label=${label} hint=${hint} value=${draft.values[name] ?? ""} error=${error}
    onInput=${(text) => change({ values: { ...draft.values, [name]: text } })}
  />`;
  const isWrongBelow = HIDDEN.some((name) => isWrong(error, name));
  return html`
    <div class="fields">
      ${MAIN.map(field)}
      <${Lines} name="stop" label="Stop at" hint="one text a line" value=${draft.stop} error=${error}
        onInput=${(stop) => change({ stop })} />
    </div>
    <details open=${isWrongBelow}>
      <summary>More</summary>
      <div class="fields">
        ${REST.map(field)}
        <${Lines} name="other" label="Other fields, as JSON" hint=${'{"top_k": 40}'} value=${draft.other} error=${error}
          onInput=${(other) => change({ other })} />
        <label class="check"><input type="checkbox" checked=${draft.ignoreEos}
          onChange=${(event) => change({ ignoreEos: event.target.checked })} />Ignore the end token</label>
      </div>
    </details>
  `;
}

/** `error` is an `ApiError` or null; it is shown if it names this field. */
const Field = ({ name, label, hint, value, onInput, error }) => html`
  <div class="field">
    <label for=${`field-${name}`}>${label}</label>
    <input ...${control({ name, hint, value, onInput, error })} inputmode="decimal" />
    <${Wrong} name=${name} error=${error} />
  </div>
`;

/** A field of several lines. */
const Lines = ({ name, label, hint, value, onInput, error }) => html`
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

const Wrong = ({ name, error }) =>
  isWrong(error, name) && html`<span class="wrong" id=${`wrong-${name}`} role="alert">${error.message}</span>`;

/** Whether an error is about a field: `stop.0` is about `stop`. */
export const isWrong = (error, name) => error !== null && (error.param === name || Boolean(error.param?.startsWith(`${name}.`)));
