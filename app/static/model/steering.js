// Steering: a direction from two prompts, how strong it is added after a layer, and replies with it and without.
import { useEffect } from "preact/hooks";
import { call, download, need, scratch, stream } from "../lib/api.js";
import { html } from "../lib/html.js";
import { read } from "../lib/safetensors.js";
import { Button, errorElse, errorOf, Failure, Field, Folded, useAction } from "../shell/controls.js";
import { called, CopyAs, literal, pythonOf } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { say } from "../state/notices.js";
import { perKey } from "../state/per_key.js";
import { formIn, heed, tell } from "../state/route.js";
import { steering } from "./arming.js";
import { numberOf } from "./edits.js";
import { isVector, keepVector, NameField, VectorOptions } from "./vectors.js";

/** Pairs whose difference is known to do something, also in small models. */
const PRESETS = [
  { title: "Fairy tale", plus: "Once upon a time a princess", minus: "The quarterly financial report", prompt: "The meeting today was about", factor: "0.6" },
  { title: "Love", plus: "I love this wonderful day", minus: "I hate this terrible day", prompt: "Today I feel", factor: "1" },
  { title: "Weddings", plus: "The wedding", minus: "The office", prompt: "I went up to my friend and said", factor: "1.2" },
];
const MOST_TOKENS = 40;

/** The form, each field as typed; a `vector` that is kept takes the place of the two prompts. */
const FIRST = { ...PRESETS[0], vector: "", over: "last", layer: null, name: "" };
const form = perKey(FIRST);
/** `{plain, steered}`: each `{text, done}`, or null before it began; and the direction that was used, with what it was made of. */
const replies = perKey({ plain: null, steered: null });
const direction = perKey(null);
/** The form as the address has it. */
let told = null;

export function Steering() {
  const { busy, error, act } = useAction();
  const kept = form.value;
  const layers = server.value.num_layers;
  const layer = kept.layer ?? String(layers >> 1);
  const put = (changed) => (form.value = { ...form.peek(), ...changed });
  const set = ({ target }) => put({ [target.name.split("-").pop()]: target.value });
  useEffect(() => end, []);
  /** Have the address say it. */
  const keep = () => {
    const { title, name, ...asked } = { ...form.peek(), layer: form.peek().layer ?? layer };
    tell({ steer: (told = JSON.stringify(asked)) });
    return asked;
  };
  useEffect(() => heed((said) => {
    const asked = formIn(said.get("steer"), { ...FIRST, layer });
    if (!asked) return;
    form.value = asked;
    if (said.get("steer") !== told) both();
  }), []);
  const both = () => act(() => runBoth(keep()));
  const again = () => replies.peek().plain && runSteered(keep()).catch((failed) => say(`Steering: ${failed.message}`, "error", failed));
  const text = (name, label, wide) => html`<${Field} wide=${wide} id="steer-${name}" label=${label} error=${errorOf(error, `steer-${name}`)} control=${(tied) => html`
    <input ...${tied} value=${kept[name]} autocomplete="off" onInput=${set} />`} />`;
  return html`
    <section class="panel steering stack" aria-labelledby="steering-title">
      <div class="row"><h2 id="steering-title">Steering</h2>
        ${PRESETS.map(({ title, ...preset }) => html`<button key=${title} aria-pressed=${preset.plus === kept.plus && !kept.vector}
          onClick=${() => put({ ...preset, vector: "" })}>${title}</button>`)}
      </div>
      <${Folded} title="Direction, layer, prompt and strength" open=${Boolean(error)}><form class="fields" noValidate onSubmit=${(event) => (event.preventDefault(), both())}>
        <${Field} id="steer-vector" label="Direction" control=${(tied) => html`<select ...${tied} value=${isVector(kept.vector) ? kept.vector : ""} onChange=${set}>
          <${VectorOptions} none="from two prompts" /></select>`} />
        <${Field} id="steer-layer" label="After layer" error=${errorOf(error, "steer-layer")} control=${(tied) => html`
          <input ...${tied} type="number" min="0" max=${layers - 1} value=${layer} onInput=${set} />`} />
        ${!kept.vector && html`${text("plus", "More of")} ${text("minus", "Less of")}
          <${Field} id="steer-over" label="Taken over" control=${(tied) => html`<select ...${tied} value=${kept.over} onChange=${set}>
            <option value="last">the last position</option><option value="mean">the mean of all positions</option>
          </select>`} />`}
        ${text("prompt", "Prompt of both replies", true)}
        <${Field} wide id="steer-factor" label="Strength: ${kept.factor}" error=${errorOf(error, "steer-factor")} control=${(tied) => html`
          <input ...${tied} type="range" min="-4" max="4" step="0.1" value=${kept.factor} onInput=${set} onChange=${again} />`} />
      </form><//>
      <div class="row">
        <${Button} class="primary" why=${busy && "Both replies are on their way."} onClick=${both}>Run both<//>
        <${CopyAs} of=${{ steering: () => callsFor({ ...kept, layer }) }} python=${() => pythonFor({ ...kept, layer })} before=${keep} />
      </div>
      <${Failure} error=${errorElse(error, ["plus", "minus", "prompt", "layer", "factor"].map((name) => `steer-${name}`))} />
      <div class="sides">
        <${Reply} title="As it is" prompt=${kept.prompt} reply=${replies.value.plain} />
        <${Reply} title=${`Steered by ${kept.factor}`} prompt=${kept.prompt} reply=${replies.value.steered} />
      </div>
      <${Keep} put=${put} />
    </section>
  `;
}

const Reply = ({ title, prompt, reply }) => html`<article aria-label=${title}>
  <h3>${title}</h3>
  <p class="reply mono" aria-live="polite">${reply ? html`<span class="dim">${prompt}</span>${reply.text}` : html`<span class="dim">The reply streams here.</span>`}</p>
</article>`;

function Keep({ put }) {
  const { busy, error, act } = useAction();
  const { name, vector } = form.value;
  const found = direction.value;
  if (found === null || vector) return null;
  const keep = async (event) => {
    event.preventDefault();
    if ((await act(() => keepVector(name, found.vector))).done) put({ name: "", vector: name });
  };
  return html`<form class="row keep" noValidate onSubmit=${keep}>
    <p role="status" class="dim">The norm of the direction is ${norm(found.vector).toFixed(3)}.</p>
    <${NameField} id="vector-name" label="Keep as" error=${errorOf(error, "vector-name")} value=${name} set=${(changed) => put({ name: changed })} />
    <${Button} type="submit" why=${busy && "It is being kept."}>Keep the vector<//>
    <${Failure} error=${errorElse(error, ["vector-name"])} />
  </form>`;
}

const norm = (values) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));

let [ending, endingSteered] = [null, null];
const end = () => [ending, endingSteered].forEach((each) => each?.abort());

async function runBoth(asked) {
  need(asked.prompt, { param: "prompt", message: "enter a prompt" });
  end();
  ending = new AbortController();
  if (!asked.vector) await directionOf(asked); // what is wrong with it is told before anything runs
  replies.value = { plain: { text: "", done: false }, steered: { text: "", done: false } };
  await Promise.all([runSteered(asked), reply("plain", asked.prompt, null, ending.signal)]);
}

/** The steered reply alone: the slider has moved. */
async function runSteered({ prompt, factor, ...asked }) {
  endingSteered?.abort();
  const { signal } = (endingSteered = new AbortController());
  const layer = numberOf(asked.layer, { param: "layer", message: "enter a layer" });
  const vector = asked.vector || (await directionOf(asked));
  if (signal.aborted) return;
  const edit = added(typeof vector === "string" ? vector : [...vector], factor);
  await reply("steered", prompt, { layer, action: "edit", edits: [edit] }, signal);
}

const added = (vector, factor) => ({ op: "add", vector, factor: Number(factor), keep_norm: true });

/** The difference of the two prompts, computed once. */
async function directionOf({ plus, minus, layer, over }) {
  const key = JSON.stringify([plus, minus, layer, over]);
  if (direction.peek()?.key !== key) direction.value = { key, vector: await difference({ plus, minus, layer, over }) };
  return direction.peek().vector;
}

/** A Float32Array: what `plus` has after `layer`, minus what `minus` has. `over` is "last" for the prompts' last
 * positions, "mean" for the means over all of them. */
async function difference({ plus, minus, layer: text, over }) {
  for (const [param, prompt] of Object.entries({ plus, minus })) need(prompt, { param, message: "enter a prompt" });
  const layer = numberOf(text, { param: "layer", message: "enter a layer" });
  const body = { prompts: [plus, minus], points: ["resid_post"], layers: [layer], reduce: over };
  const [{ values }] = read(await download("POST", "/v1/experiments/activations", { body }).catch((error) => {
    throw Object.assign(error, { param: NAMES[error.param] ?? error.param });
  }));
  const size = values.length / 2;
  return values.subarray(0, size).map((value, at) => value - values[size + at]);
}

/** The page's names of the fields of that call. */
const NAMES = { layers: "layer", "prompts.0": "plus", "prompts.1": "minus" };

/** Stream a reply from a session opened for it. */
async function reply(side, prompt, breakpoint, signal) {
  const change = (changed) => !signal.aborted && (replies.value = { ...replies.peek(), [side]: { ...replies.peek()[side], ...changed } });
  change({ text: "", done: false });
  const onEvent = ({ name, data }) => {
    if (name === "error") throw Object.assign(new Error(data.error.message), { param: data.error.param });
    if (name === "token") change({ text: replies.peek()[side].text + data.text });
  };
  try {
    await scratch("steering", async (path) => {
      if (breakpoint) await call("POST", `${path}/breakpoints`, { body: breakpoint });
      await stream("POST", `${path}/generate`, { body: { ...turnOf(prompt), stream: true }, signal, onEvent });
    });
    change({ done: true });
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

const turnOf = (prompt) => ({ prompt, max_tokens: MOST_TOKENS, temperature: 0 });

function pythonFor({ plus, minus, over, vector, prompt, layer, factor }) {
  const made = [
    `read = ${called("djinn.activations", [[plus, minus]], { points: ["resid_post"], layers: [Number(layer)], reduce: over })}`,
    `plus, minus = read.tensors["resid_post"][:, 0]`, "vector = plus - minus",
  ];
  return pythonOf(
    ...(vector ? [`vector = ${literal(vector)}`] : made),
    "for strength in (0, " + Number(factor) + "):", "    with djinn.sessions.create() as session:",
    `        if strength:`, `            session.steer(layer=${Number(layer)}, add=vector, factor=strength, keep_norm=True)`,
    `        print(strength, ${called("session.generate", [], turnOf(prompt))}.text)`,
  );
}

/** Of a vector that is kept: the numbers of one from two prompts are too many for a line. */
function callsFor({ vector, name, prompt, layer, factor }) {
  const its = vector || name;
  if (!isVector(its)) throw new Error("keep the direction as a vector first: its numbers do not fit a command line");
  return [
    ["POST", "/v1/sessions"],
    steering({ id: "ID" }, { layer: Number(layer) }, added(its, factor)),
    ["POST", "/v1/sessions/ID/generate", { body: turnOf(prompt) }],
  ];
}
