// How a turn chooses its tokens and where it ends, with what is wrong below each field.
import { html } from "../lib/html.js";
import { Field, isAbout } from "../shell/controls.js";
import { FIELDS } from "./draft.js";

const MAIN = FIELDS.filter((each) => each.main);
const REST = FIELDS.filter((each) => !each.main);

export function Settings({ draft, change, error }) {
  const field = ({ name, label, hint }) => html`<${Setting}
    key=${name} name=${name} label=${label} hint=${hint} value=${draft.values[name] ?? ""} error=${error}
    onInput=${(text) => change({ values: { ...draft.values, [name]: text } })}
  />`;
  const isBelow = Boolean(error && (draft.other || REST.some(({ name }) => isAbout(error, name))));
  return html`
    <div class="fields">
      ${MAIN.map(field)}
      <${Setting} rows="1" name="stop" label="Stop at" hint="one text a line" value=${draft.stop} error=${error}
        onInput=${(stop) => change({ stop })} />
    </div>
    <details open=${draft.more || isBelow} onToggle=${({ target }) => change({ more: target.open })}>
      <summary>More</summary>
      <div class="fields">
        ${REST.map(field)}
        <${Setting} rows="1" name="other" label="Other fields, as JSON" hint=${'{"top_k": 40}'} value=${draft.other} error=${error}
          onInput=${(other) => change({ other })} />
        <label class="check"><input type="checkbox" checked=${draft.ignoreEos}
          onChange=${(event) => change({ ignoreEos: event.target.checked })} />Ignore the end token</label>
      </div>
    </details>
  `;
}

/** `error` is an `ApiError` or null; it is shown if it names this field. `rows` makes it a field of so many lines. */
const Setting = ({ name, label, hint, value, onInput, error, rows = null }) => html`
  <${Field} id="field-${name}" name=${name} label=${label} error=${isAbout(error, name) ? error.message : null}
    control=${(tied) => {
      const props = { ...tied, value, placeholder: hint, autocomplete: "off", onInput: (event) => onInput(event.target.value) };
      return rows ? html`<textarea rows=${rows} ...${props} />` : html`<input inputmode="decimal" ...${props} />`;
    }} />
`;
