// The screen of experiments: patches of one prompt into another, and what the heads that matter look at.
import { useEffect, useMemo } from "preact/hooks";
import { number, percent, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { HeadLooks, readAgain } from "../model/attention.js";
import { LookAt } from "../model/example.js";
import { moved } from "../model/heatmap.js";
import { Failure, isPhone, Loading, useAction } from "../shell/controls.js";
import { connection, server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { perKey } from "../state/per_key.js";
import { loadPoints } from "../state/points.js";
import { formIn, route } from "../state/route.js";
import { best, chosen, FIRST_FORM, form, METRICS, sweep, SweepForm } from "./sweep.js";

export function ExperimentsScreen() {
  useEffect(() => void attempt("Points", loadPoints), []);
  useEffect(() => void fill(route.value.id), [route.value]);
  if (server.value === null) return html`<${Loading} what="experiments" />`;
  const found = sweep.value;
  return html`<div class="experiments">
    <header class="row heading"><h1>Activation patching</h1>
      <p class="dim">Two prompts lead to two answers. Put what the model has of one into the other, place by place: which place brings the answer back?</p>
    </header>
    <div class="stack ask">${isPhone.value && found ? html`<details><summary>Another sweep</summary><div class="stack"><${SweepForm} /></div></details>` : html`<${SweepForm} />`}</div>
    <section class="panel stack answer" aria-label="The sweep">${found === null ? html`<${Nothing} />` : html`<${Result} found=${found} />`}</section>
  </div>`;
}

/** An address may hold a form, from a link that somebody kept. What is none is left alone. */
function fill(id) {
  const kept = formIn(id, FIRST_FORM);
  if (kept && METRICS[kept.kind]) form.value = kept;
}

const Nothing = () => html`<div class="nothing dim">
  <p>The answer appears here, row by row: a cell for each place, the darker, the more of the answer it brings back.</p>
  <p>Others come first: while they have turns, a sweep takes a tenth of the time.</p>
</div>`;

function Result({ found }) {
  const { told, tables, state, error } = found;
  const texts = told?.clean_texts ?? [];
  return html`
    <${Progress} found=${found} />
    ${state === "failed" && html`<${Failure} error=${error} />`}
    ${told && html`<${Prompts} told=${told} metric=${found.body.metric} />`}
    ${tables.length > 0 && html`<div class="places">
      <div class="maps">${tables.map((table) => html`<${SweepMap} key=${table.point} table=${table} texts=${texts} />`)}</div>
      <div class="stack beside">
        <p class="row tight dim scale-key">−100 % <i class="scale"></i> 100 % of the answer, brought back</p>
        <${Writers} ...${found} />
        <${Chosen} found=${found} texts=${texts} />
      </div>
    </div>`}
  `;
}

function Progress({ found }) {
  const { state, done, rows, seconds: took } = found;
  const most = best(found);
  const words = {
    running: rows === null ? "The prompts are read" : `${number(done)} of ${number(rows)} places`,
    done: `${number(rows)} places${took === null ? "" : ` in ${seconds(took)}`}`,
    stopped: `Stopped after ${number(done)} places`,
    failed: "It has failed",
  };
  return html`<div class="row sweep-progress">
    <p role="status">${words[state]}${most && html`. <b>${nameOf(most, found)}</b> brings back <b>${shareOf(most.normalized)}</b>${state === "running" ? " so far" : ""}${writing(found, most)}.`}</p>
    ${state === "running" && html`<progress aria-label="The sweep" max=${rows ?? 1} value=${rows === null ? null : done}></progress>`}
  </div>`;
}

function nameOf({ point, layer, column }, { body, told }) {
  if (body.by === "head") return `Head ${column} of layer ${layer}`;
  return `${body.points.length > 1 ? `${point} of layer` : "Layer"} ${layer} at “${visible(told.clean_texts[column])}”`;
}

const wordOf = (token) => (typeof token === "number" ? `#${token}` : `“${visible(token)}”`);

/** What a head of the sweep writes, in words, if that is known. */
function writing({ writers, body: { metric } }, { point, layer, column }) {
  const own = point === "z" && writers?.heads?.find((each) => each.layer === layer && each.head === column);
  return own ? html`, and writes <b>${signed(own.value)}</b> toward ${wordOf(metric.answer)}` : null;
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

const WRITERS = 3;

function Writers({ writers, body: { metric } }) {
  if (writers?.error) return html`<p class="dim">What each head writes is not known: ${writers.error.message}</p>`;
  return writers && html`<p class="row tight">Most toward ${wordOf(metric.answer)}, and away from ${wordOf(metric.wrong)}:
    ${writers.heads.slice(0, WRITERS).map(({ layer, head, value }) => html`<button key=${`${layer} ${head}`}
      onClick=${() => (chosen.value = { point: "z", layer, column: head })}>Head ${head} of layer ${layer} <b>${signed(value)}</b></button>`)}</p>`;
}

function Prompts({ told, metric }) {
  const { clean_token_ids: clean, corrupted_token_ids: corrupted } = told;
  const line = (name, texts, value) => html`<dt>${name}</dt><dd>
    <span class="mono">${texts.map((text, at) => (clean[at] === corrupted[at] ? text : html`<mark>${text}</mark>`))}</span>
    <span class="number" title=${METRICS[metric.kind].label}>${value.toFixed(2)}</span></dd>`;
  return html`<dl class="prompts">${line("clean", told.clean_texts, told.clean)}${line("corrupted", told.corrupted_texts, told.corrupted)}</dl>`;
}

/** A place that brings back less has no figure: it would hide those that matter. */
const WORTH = 0.095;
/** Colours of small shares are stronger than those: a third can be seen beside a whole. */
const FAINT = 0.7;

/** `texts` are those of the prompt's tokens. */
function SweepMap({ table, texts }) {
  const { point, by, layers, columns, rows } = table;
  const here = chosen.value?.point === point ? chosen.value : null;
  const choose = (row, column) => (chosen.value = { point, layer: layers[row], column: columns[column] });
  const onClick = ({ target }) => {
    const cell = target.closest("[data-at]");
    if (cell) choose(...cell.dataset.at.split(" ").map(Number));
  };
  const onKeyDown = (event) => {
    const from = here ? [layers.indexOf(here.layer), columns.indexOf(here.column)] : [0, 0];
    const to = moved(event, from, [layers.length, columns.length]);
    if (to) choose(...to);
  };
  return html`<figure class="sweep-map" style=${{ "--columns": columns.length }}>
    <figcaption><b>${point}</b> <span class="dim">by layer and ${by === "head" ? "head" : "token"}</span></figcaption>
    <div class="scroll"><div class="grid" role="grid" tabindex="0" aria-label=${`${point} by layer and ${by}`} aria-rowcount=${layers.length + 1}
      aria-activedescendant=${here && idOf(point, here.layer, here.column)} onClick=${onClick} onKeyDown=${onKeyDown}>
      <div role="row" class="line names"><span role="columnheader" class="dim">layer</span>
        ${columns.map((column) => html`<span key=${column} role="columnheader" title=${by === "head" ? `head ${column}` : `position ${column}`}>
          ${by === "head" ? column : visible(texts[column])}</span>`)}
      </div>
      ${layers.map((layer, at) => html`<${Line} key=${layer} point=${point} layer=${layer} at=${at} columns=${columns} row=${rows[at]}
        chosen=${here?.layer === layer ? here.column : null} />`)}
    </div></div>
  </figure>`;
}

const idOf = (point, layer, column) => `place-${point}-${layer}-${column}`;

/** Drawn again only where something of it is new. */
function Line({ point, layer, at, columns, row, chosen: column }) {
  return useMemo(() => html`<div role="row" class="line" aria-label="layer ${layer}">
    <span role="rowheader" class="dim">${layer}</span>
    ${row.map((place, index) => html`<${Place} key=${index} id=${idOf(point, layer, columns[index])} place=${place} at=${`${at} ${index}`}
      isChosen=${column === columns[index]} />`)}
  </div>`, [row, column, columns]);
}

function Place({ id, place, at, isChosen }) {
  const share = place?.normalized ?? null;
  const name = place === null ? "waits" : share === null ? "not known" : "";
  const side = share === null ? name : share < 0 ? "less" : "more";
  return html`<span id=${id} role="gridcell" data-at=${at} class="place ${side.replace(" ", "-")} ${isChosen ? "chosen" : ""}" aria-selected=${isChosen}
    aria-label=${name || shareOf(share)} style=${{ "--p": `${Math.round(100 * Math.min(1, Math.abs(share ?? 0)) ** FAINT)}%` }}
  >${share !== null && Math.abs(share) >= WORTH ? Math.round(100 * share) : ""}</span>`;
}

/** Below zero it leads away from the answer. */
const shareOf = (share) => `${share < 0 ? "−" : ""}${percent(Math.abs(share))}`;

function Chosen({ found, texts }) {
  const here = chosen.value;
  if (here === null) return html`<p class="dim">Choose a cell to see more of it. Arrow keys move the choice.</p>`;
  const table = found.tables.find(({ point }) => point === here.point);
  const place = table?.rows[table.layers.indexOf(here.layer)]?.[table.columns.indexOf(here.column)];
  const share = place?.normalized ?? null;
  return html`<section class="stack place-details" aria-label="The chosen place">
    <div class="row">
      <h2>${nameOf(here, found)}</h2>
      <p role="status">${place ? html`${METRICS[found.body.metric.kind].label} <b>${place.value.toFixed(2)}</b>${share !== null && html`, <b>${shareOf(share)}</b> of the answer`}${writing(found, here)}` : "is not done yet"}</p>
      <${LookAt} question=${found.body.clean} layer=${here.layer} position=${found.body.by === "head" ? null : here.column} />
    </div>
    ${QUERIES.includes(here.point) && found.body.by === "head" && html`<${HeadOf} key=${`${here.layer} ${found.told.clean_token_ids}`} prompt=${found.told.clean_token_ids} layer=${here.layer} head=${here.column} texts=${texts} />`}
  </section>`;
}

/** The patterns that were read, by prompt and layer: signals of their heads. */
const patterns = perKey(new Map());

/** Points that have a head for each pattern: heads of keys and values may be fewer. */
const QUERIES = ["q", "q_rot", "z"];

function HeadOf({ prompt, layer, head, texts }) {
  const { error, act } = useAction();
  const key = `${layer} ${prompt}`;
  const heads = patterns.value.get(key);
  const load = () => act(async () => {
    const read = await readAgain(prompt, layer);
    patterns.value = new Map(patterns.peek()).set(key, read);
  });
  useEffect(() => void (heads || load()), [connection.value.state]);
  if (error) return html`<${Failure} error=${error} retry=${load} />`;
  if (!heads) return html`<${Loading} what="what the heads look at" />`;
  const one = heads.find((each) => each.number === head);
  return one ? html`<${HeadLooks} key=${`${key} ${head}`} head=${one} texts=${texts} />` : null;
}
