// The form of a sweep of patches, and prompts to begin with.
import { called, pythonOf } from "../lib/code.js";
import { html } from "../lib/html.js";
import { Button, errorElse, errorOf, Failure, Field, told, useAction, Wrong } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { points } from "../state/points.js";
import { experimentLink, replace } from "../state/route.js";
import { bodyOf, FIRST_FORM, form, METRICS, PRESETS, run, stop, sweep } from "./sweep.js";

const SHOWN = ["sweep-clean", "sweep-corrupted", "sweep-answer", "sweep-wrong", "points"];

export function SweepForm() {
  const { error: empty, act } = useAction();
  const isRunning = sweep.value?.state === "running";
  const error = empty ?? sweep.value?.error ?? null;
  const { by, kind, into } = form.value;
  const put = (changed) => (form.value = { ...form.peek(), ...changed });
  const set = ({ target }) => put({ [target.name.split("-").pop()]: target.value });
  const start = () => act(async () => {
    const body = bodyOf(form.peek());
    replace(experimentLink(form.peek()));
    void run(body); // it tells by itself what becomes of it
  });
  const submit = (event) => {
    event.preventDefault();
    start();
  };
  const text = (name, label, hint) => html`<${Field} id="sweep-${name}" label=${label} error=${errorOf(error, `sweep-${name}`)} control=${(tied) => html`
    <input ...${tied} value=${form.value[name]} placeholder=${hint} autocomplete="off" spellcheck=${false} onInput=${set} />`} />`;
  return html`
    <${Presets} start=${start} />
    <form class="panel stack sweep-form" noValidate aria-label="A sweep" onSubmit=${submit}>
      ${text("clean", "Clean prompt: it leads to the answer")} ${text("corrupted", "Corrupted prompt: as many tokens")}
      <div class="fields">
        <${Field} id="sweep-kind" label="Measured" control=${(tied) => html`<select ...${tied} value=${kind} onChange=${set}>
          ${Object.entries(METRICS).map(([name, { label }]) => html`<option value=${name}>${label}</option>`)}
        </select>`} />
        ${METRICS[kind].takes.includes("answer") && text("answer", "Answer", "a token, or #id")}
        ${METRICS[kind].takes.includes("wrong") && text("wrong", "Less that of", "a token, or #id")}
        <${Field} id="sweep-by" label="Patched alone" control=${(tied) => html`<select ...${tied} value=${by}
          onChange=${({ target }) => put({ by: target.value, points: target.value === "head" ? ["z"] : ["resid_post"] })}>
          <option value="position">each token</option><option value="head">each head</option>
        </select>`} />
        <${Field} id="sweep-into" label="Into" control=${(tied) => html`<select ...${tied} value=${into} onChange=${set}>
          <option value="corrupted">the corrupted run</option><option value="clean">the clean run</option>
        </select>`} />
      </div>
      <${PointChoice} put=${put} error=${errorOf(error, "points")} />
      <div class="row">
        ${isRunning ? html`<${Button} onClick=${stop}>Stop<//>` : html`<${Button} type="submit" class="primary">Run the sweep<//>`}
        <${CopyAs} what="the sweep" python=${() => pythonFor(bodyOf(form.peek()))}
          calls=${() => [["POST", "/v1/experiments/patching", bodyOf(form.peek())]]} />
      </div>
      <${Failure} error=${errorElse(error, SHOWN)} />
    </form>
  `;
}

const Presets = ({ start }) => html`<ul class="presets">${PRESETS.map(({ title, about, form: preset }) => html`<li key=${title}>
  <${Button} onClick=${() => {
    form.value = { ...FIRST_FORM, ...preset };
    start();
  }}><b>${title}</b> <span class="dim">${about}</span><//>
</li>`)}</ul>`;

/** Points of layers that can be changed; by heads, those that have some. */
function PointChoice({ put, error }) {
  const { by, points: names } = form.value;
  const isOffered = (each) => each.layers && !each.no_edit && (by !== "head" || each.heads);
  const offered = [...new Set(points.value.filter(isOffered).map(({ name }) => name))];
  const toggle = (name) => put({ points: names.includes(name) ? names.filter((each) => each !== name) : [...names, name] });
  return html`<fieldset class="choice" ...${told("sweep-points", error)}>
    <legend>At these points</legend>
    ${offered.map((name) => html`<label key=${name}><input type="checkbox" checked=${names.includes(name)} onChange=${() => toggle(name)} />${name}</label>`)}
    <${Wrong} id="sweep-points" error=${error} />
  </fieldset>`;
}

function pythonFor({ clean, corrupted, metric: { kind, ...tokens }, ...rest }) {
  return pythonOf(
    `sweep = ${called("djinn.patching", [clean, corrupted], { metric: kind, ...tokens, ...rest })}`,
    "for table in sweep.tables:", "    print(table.point, table.best())", "sweep  # in a notebook: a heatmap",
  );
}
