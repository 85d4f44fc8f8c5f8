// Dictionaries: the features that are most active at the chosen token, where each is explained, and one that is held.
import { useEffect, useState } from "preact/hooks";
import { call, need, post } from "../lib/api.js";
import { number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { Button, errorElse, errorOf, Failure, Field, isPhone, Loading, useAction } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { say } from "../state/notices.js";
import { perKey } from "../state/per_key.js";
import { where } from "../state/points.js";
import { heed, tell } from "../state/route.js";
import { arm, capturing, steering } from "./arming.js";
import { useLook } from "./norms.js";

/** Those of the caller, by name; null before the first answer. */
const dictionaries = perKey(null);
const load = async () => (dictionaries.value = (await call("GET", "/v1/dictionaries")).data);
const TOP = 10;

export function Features({ desk }) {
  const { error, act } = useAction();
  const [name, setName] = useState("");
  useEffect(() => void act(load), []);
  useEffect(() => heed((said) => setName(said.get("features") ?? "")), []);
  const choose = ({ target }) => {
    setName(target.value);
    tell({ features: target.value });
  };
  const found = dictionaries.value;
  const chosen = found?.find((each) => each.name === name) ?? found?.[0];
  return html`
    <section class="panel features stack" aria-labelledby="features-title">
      <div class="row"><h2 id="features-title">Features</h2>
        ${chosen && html`<label>of <select value=${chosen.name} onChange=${choose}>
          ${found.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
        </select></label>
        <span class="dim">${chosen.architecture}, ${number(chosen.features)} features ${where(chosen.point, [chosen.layer])}</span>`}
      </div>
      <${Failure} error=${error} retry=${() => act(load)} />
      ${found === null && !error && html`<${Loading} what="dictionaries" />`}
      ${chosen && html`<${Active} key=${chosen.name} desk=${desk} dictionary=${chosen} />`}
      <details open=${found?.length === 0 && !isPhone.value}><summary>Add a dictionary</summary><${Upload} /></details>
    </section>
  `;
}

/** What is active at the position that is looked at. */
function Active({ desk, dictionary }) {
  const { error, act, busy } = useAction();
  const { name, layer, point } = dictionary;
  const isCaptured = (desk.breakpoints.value ?? []).some((each) => each.action === "capture" && each.point === point && each.layers.includes(layer));
  const told = useLook(desk, "features", { dictionary: name, top_k: TOP }, isCaptured);
  const at = told.found?.positions[0];
  const most = Math.max(1e-9, ...(at?.top ?? []).map((each) => each.activation ?? 0));
  return html`
    <${Failure} error=${told.error ?? error} />
    ${at ? html`<p role="status">At position ${at.position}, <code>${visible(at.text)}</code>: ${at.top.length === 0 ? "no feature is active." : "the most active first."}</p>
      <ol class="features-list">${at.top.map(({ index, activation }) => html`<li key=${index}>
        ${dictionary.url ? html`<a href=${dictionary.url.replace("{feature}", index)} target="_blank" rel="noreferrer">${index}</a>` : html`<span>${index}</span>`}
        <span class="bar" style=${{ "--p": `${(100 * (activation ?? 0)) / most}%` }}></span>
        <span class="number">${activation?.toFixed(2) ?? "not finite"}</span>
        <${Button} why=${busy ? "One moment" : null} aria-label="Double feature ${index} from here on" onClick=${() => act(() => hold(desk, dictionary, index, 2))}>Double<//>
        <${Button} why=${busy ? "One moment" : null} aria-label="Switch feature ${index} off from here on" onClick=${() => act(() => hold(desk, dictionary, index, 0))}>Off<//>
      </li>`)}</ol>`
    : html`<p class="dim" role="status">Nothing is kept ${where(point, [layer])} at this position. Capture it, and start a turn.</p>`}
    <div class="row">
      ${!isCaptured && html`<${Button} class="primary" why=${busy ? "One moment" : null} onClick=${() => act(() => arm(desk, capturing(desk, dictionary)))}>Capture ${where(point, [layer])}<//>`}
      <${CopyAs} of=${{ "the features": () => [told.asked], "the capture": () => [capturing(desk, dictionary)] }} />
    </div>
  `;
}

async function hold(desk, { name, layer, point }, index, factor) {
  const feature = { dictionary: name, index };
  await arm(desk, steering(desk, { layer, point }, factor === 0 ? { op: "ablate", feature } : { op: "scale", feature, factor }));
  say(`Feature ${index} is ${factor === 0 ? "off" : "doubled"} ${where(point, [layer])}, from the next turn on. “Edit” lists it.`);
}

function Upload() {
  const { busy, error, act } = useAction();
  const add = async (event) => {
    event.preventDefault();
    const target = event.target;
    const { done } = await act(async () => {
      const fields = new FormData(target);
      for (const [name, value] of [...fields]) if (value === "" || value.size === 0) fields.delete(name);
      need(fields.has("name"), { param: "name", message: "enter a name" });
      need(fields.has("weights"), { param: "weights", message: "choose the file with the weights" });
      await post("/v1/dictionaries", fields);
      await load();
    });
    if (done) target.reset();
  };
  const field = (name, label, props) => html`<${Field} id="dictionary-${name}" name=${name} label=${label} error=${errorOf(error, name)}
    control=${(tied) => html`<input ...${tied} ...${props} />`} />`;
  return html`<form class="fields" noValidate onSubmit=${add}>
    ${field("name", "Name", { autocomplete: "off" })}
    ${field("weights", "Weights (.safetensors or .npz)", { type: "file", accept: ".safetensors,.npz" })}
    ${field("cfg", "cfg.json, of SAELens", { type: "file", accept: ".json" })}
    ${field("layer", "Layer, without a cfg.json", { type: "number", min: 0 })}
    <${Button} type="submit" why=${busy && "It is being read."}>Add the dictionary<//>
    <${Failure} error=${errorElse(error, ["name", "weights", "cfg", "layer"])} />
  </form>`;
}
