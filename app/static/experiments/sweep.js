// A sweep of patches: its form, with prompts to begin with, and the answer as it comes, place by place.
import { call, need, scratch, stream } from "../lib/api.js";
import { html } from "../lib/html.js";
import { Button, errorElse, errorOf, Failure, Field, told, useAction, Wrong } from "../shell/controls.js";
import { called, CopyAs, pythonOf } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { perKey } from "../state/per_key.js";
import { pointIn, points } from "../state/points.js";
import { experimentLink, replace } from "../state/route.js";
import { byFrame } from "../state/turns.js";

/** Prompts that are worth a try. The first one is the question of Wang et al. (2022): arXiv:2211.00593. */
const NAME = {
  clean: "When John and Mary went to the shop, John gave a bottle to",
  corrupted: "When John and Mary went to the shop, Mary gave a bottle to",
  kind: "logit_difference", answer: " Mary", wrong: " John",
};
const FACT = { clean: "The capital of France is", corrupted: "The capital of Italy is", kind: "logit_difference", answer: " Paris", wrong: " Rome" };
export const PRESETS = [
  { title: "Which head moves the name?", about: "Each head alone, in two prompts that differ in one name", form: { ...NAME, points: ["z"], by: "head" } },
  { title: "Where is the name?", about: "The residual stream, layer by layer and token by token", form: { ...NAME, points: ["resid_post"], by: "position" } },
  { title: "Who knows the capital?", about: "What attention and what the feed-forward of each layer add", form: { ...FACT, points: ["attn_out", "mlp_out"], by: "position" } },
];
export const FIRST_FORM = { ...PRESETS[0].form, into: "corrupted" };
/** What each metric needs. */
export const METRICS = {
  logit_difference: { label: "logit difference", takes: ["answer", "wrong"] },
  probability: { label: "probability", takes: ["answer"] },
  kl: { label: "KL divergence", takes: [] },
};

/** The form, each field as typed. */
export const form = perKey(FIRST_FORM);
/** `{body, state, told, tables, done, rows, seconds, error, writers}`; null before the first. `state` is `running`, `done`, `stopped`
 * or `failed`; `told` what the first event said of the prompts, or null. A table is `{point, by, layers, columns, rows}`, with
 * a list of `{value, normalized}` for each layer: null where a place is not done. `writers` is what `readWriters` gave, or null. */
export const sweep = perKey(null);
/** The place that is looked at, `{point, layer, column}`, or null. */
export const chosen = perKey(null);

/** The body of the request. Throws `ApiError` where a field is empty. */
function bodyOf({ clean, corrupted, kind, answer, wrong, points: names, by, into }) {
  for (const [param, text] of Object.entries({ clean, corrupted })) need(text, { param, message: "enter a prompt" });
  const asked = Object.entries({ answer, wrong }).filter(([param]) => METRICS[kind].takes.includes(param));
  for (const [param, text] of asked) need(text, { param, message: "enter a token" });
  need(names.length, { param: "points", message: "choose what is patched" });
  const tokens = Object.fromEntries(asked.map(([param, text]) => [param, tokenOf(text)]));
  return { clean, corrupted, metric: { kind, ...tokens }, points: names, by, into };
}

/** A token by its id, as in #262, or its text. */
const tokenOf = (text) => (/^#\d+$/.test(text) ? Number(text.slice(1)) : text);

let ending = null;
/** End the sweep that runs, if one does. What is there stays. */
const stop = () => ending?.abort();

/** Ask for a sweep, and fill `sweep` as its places are done. */
async function run(body) {
  stop();
  const { signal } = (ending = new AbortController());
  chosen.value = null;
  sweep.value = { body, state: "running", told: null, tables: [], done: 0, rows: null, seconds: null, error: null, writers: null };
  const isMine = () => sweep.peek()?.body === body;
  const change = (changed) => isMine() && (sweep.value = { ...sweep.peek(), ...changed });
  const places = byFrame((fresh) => isMine() && change(filled(sweep.peek(), fresh)));
  const asked = performance.now();
  const onEvent = ({ name, data }) => {
    if (name === "started") {
      change({ told: data, rows: data.rows, tables: tablesOf(body, data) });
      if (writes(body)) readWriters(body, data.clean_token_ids).catch((error) => ({ error })).then((writers) => change({ writers }));
    }
    else if (name === "row") places.take(data);
    else if (name === "finished") change({ seconds: data.seconds, state: "done" });
    else if (name === "error") throw Object.assign(new Error(data.error.message), { param: data.error.param });
  };
  try {
    await stream("POST", "/v1/experiments/patching", { body: { ...body, stream: true }, signal, onEvent });
  } catch (error) {
    change(error.name === "AbortError" ? { state: "stopped" } : { state: "failed", error: Object.assign(error, { asked }) });
  }
  places.stop();
  const { state } = sweep.peek() ?? {};
  if (isMine() && state === "done") chosen.value = best(sweep.peek());
}

/** Whether it can be told what the heads of a sweep write. */
const writes = ({ by, points: names, metric }) => by === "head" && names.includes("z") && metric.kind === "logit_difference";

/** Direct logit attribution: what each head adds to the difference of the two logits at the last token of the clean prompt, largest
 * first, `{heads: [{layer, head, value}]}`. It takes one pass of a session that it opens and closes. */
async function readWriters({ metric: { answer, wrong } }, prompt) {
  const idOf = async (token) => (typeof token === "number" ? token : (await call("POST", "/tokenize", { body: { prompt: token, add_special_tokens: false } })).tokens[0]);
  const tokens = [await idOf(answer), await idOf(wrong)];
  return scratch("attribution", async (path) => {
    const kept = [{ point: "z", layers: layersOf("z") }, { layers: [server.peek().num_layers - 1] }];
    for (const each of kept) await call("POST", `${path}/breakpoints`, { body: { ...each, action: "capture" } });
    await call("POST", `${path}/generate`, { body: { token_ids: prompt, max_tokens: 0 } });
    const { units } = await call("GET", `${path}/attribution`, { query: { tokens } });
    const heads = units.flatMap(({ layer, units: each }) => each.map(({ index, value }) => ({ layer, head: index, value })));
    return { heads: heads.sort((one, other) => other.value - one.value) };
  });
}

/** The layers that have a point, rising. */
const layersOf = (point) => points.peek().filter((each) => each.name === point).flatMap((each) => each.layers).sort((one, other) => one - other);

/** Tables without values: the server says how many places there are, and the model's points which. */
function tablesOf({ points: names, by }, { clean_token_ids: clean, corrupted_token_ids: corrupted }) {
  const first = clean.findIndex((id, position) => id !== corrupted[position]);
  return names.map((point) => {
    const layers = layersOf(point);
    const heads = Math.max(0, ...layers.map((layer) => pointIn(layer, point).heads ?? 1));
    const columns = by === "head" ? range(0, heads) : range(first, clean.length);
    return { point, by, layers, columns, rows: layers.map(() => columns.map(() => null)) };
  });
}

const range = (first, end) => Array.from({ length: Math.max(0, end - first) }, (_, at) => first + at);

/** With some more places. Rows in which nothing is new stay the same ones, so that they are not drawn again. */
function filled({ tables, done }, places) {
  const fresh = tables.map((table) => {
    const mine = places.filter(({ point }) => point === table.point);
    if (mine.length === 0) return table;
    const rows = [...table.rows];
    for (const { layer, column, value, normalized } of mine) {
      const at = table.layers.indexOf(layer);
      if (rows[at] === table.rows[at]) rows[at] = [...rows[at]];
      rows[at][table.columns.indexOf(column)] = { value, normalized };
    }
    return { ...table, rows };
  });
  return { tables: fresh, done: done + places.length };
}

/** The place that brings most of the answer back, `{point, layer, column, value, normalized}`, or null. */
export function best({ tables }) {
  let most = null;
  for (const { point, layers, columns, rows } of tables) {
    rows.forEach((row, at) => row.forEach((place, column) => {
      if (place?.normalized != null && !(most?.normalized >= place.normalized)) most = { point, layer: layers[at], column: columns[column], ...place };
    }));
  }
  return most;
}

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
        <${CopyAs} of=${{ "the sweep": () => [["POST", "/v1/experiments/patching", { body: bodyOf(form.peek()) }]] }} python=${() => pythonFor(bodyOf(form.peek()))} />
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
