// The fields that say how a turn chooses its tokens and where it ends.
import { html } from "../lib/html.js";
import { FIELDS } from "./draft.js";
import { Field, isWrong, Lines } from "./field.js";

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
