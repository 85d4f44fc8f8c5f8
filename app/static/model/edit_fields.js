// The fields of one edit.
import { html } from "../lib/html.js";
import { errorOf, Field } from "../shell/controls.js";
import { partOf, pointIn } from "../state/points.js";
import { OPS } from "./edits.js";
import { isVector, VectorOptions } from "./vectors.js";

export const PARAMS = ["op", "factor", "vector", "positions", "max_norm", "heads", "neurons", "experts"];

/** `onChange` is told when a field has a new value that one has settled on. */
export function EditFields({ desk, error, onChange }) {
  const form = desk.edit.value;
  const { takes, does, slider } = OPS[form.op];
  const put = (changed) => (desk.edit.value = { ...desk.edit.peek(), ...changed });
  const set = (event) => put({ [event.target.name]: event.target.value });
  const settle = (event) => {
    set(event);
    onChange();
  };
  const choose = (event) => {
    const op = event.target.value;
    put({ op, factor: OPS[op].first ?? "" });
  };
  const told = (param) => errorOf(error, param);
  const checkpoint = desk.session.value.checkpoint;
  const part = checkpoint && partOf(pointIn(checkpoint.layer, checkpoint.point));
  return html`
    <div class="fields">
      <${Field} id="op" label="Operation" error=${told("op")} control=${(tied) => html`
        <select ...${tied} value=${form.op} onChange=${choose}>
          ${Object.keys(OPS).map((op) => html`<option key=${op} value=${op}>${op.replace("_", " ")}</option>`)}
        </select>`}><span class="dim mono">h → ${does}</span><//>
      <${Factor} used=${takes.includes("factor")} slider=${slider ?? [0, 2, 0.05]} value=${form.factor}
        error=${told("factor")} set=${set} settle=${settle} />
      <${Field} id="vector" label="Vector" error=${told("vector")} control=${(tied) => html`
        <select ...${tied} value=${isVector(form.vector) ? form.vector : ""} onChange=${settle} disabled=${!takes.includes("vector")}>
          <${VectorOptions} none="none" />
        </select>`} />
      ${part && html`<${Field} id="part" label="Only ${part}" error=${told(part)} control=${(tied) => html`
        <input ...${tied} placeholder="all, or 0, 3" value=${form.part} onInput=${set} onChange=${settle} />`} />`}
      <${Where} form=${form} error=${told("positions")} set=${set} settle=${settle} />
      <${Field} id="max_norm" label="Longest change (L2)" error=${told("max_norm")} control=${(tied) => html`
        <input ...${tied} inputmode="decimal" placeholder="no limit" value=${form.max_norm}
          onInput=${set} onChange=${settle} />`} />
    </div>
  `;
}

function Factor({ used, slider: [min, max, step], value, error, set, settle }) {
  return html`<${Field} wide id="factor" label="Factor" error=${error} control=${(tied) => html`
    <span class="row tight">
      <input type="range" name="factor" aria-label="Factor, slider" min=${min} max=${max} step=${step} value=${value}
        disabled=${!used} onInput=${set} onChange=${settle} />
      <input ...${tied} inputmode="decimal" value=${value} disabled=${!used} onInput=${set} onChange=${settle} />
    </span>`} />`;
}

function Where({ form, error, set, settle }) {
  const end = (name, label) => html`<input inputmode="numeric" name=${name} aria-label=${label} placeholder=${name}
    value=${form[name]} onInput=${set} onChange=${settle} disabled=${form.positions !== "range"} />`;
  return html`<${Field} wide id="positions" label="Positions" error=${error} control=${(tied) => html`
    <span class="row tight">
      <select ...${tied} value=${form.positions} onChange=${settle}>
        <option value="last">the last</option><option value="all">all</option><option value="range">a range</option>
      </select>
      ${end("first", "First position")} ${end("end", "End of the positions, not included")}
    </span>`} />`;
}
