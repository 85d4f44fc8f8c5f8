// The session's turn: where one is written and begun, steps through a paused one, what it has said; and what others do meanwhile.
import { useEffect, useState } from "preact/hooks";
import { open } from "../lib/api.js";
import { counted, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { pathOf } from "../lib/paths.js";
import { Composer } from "../session/composer.js";
import { Button, Failure } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { connection, server } from "../state/connection.js";
import { samples } from "../state/memory.js";
import { attempt } from "../state/notices.js";
import { AFTER } from "../state/points.js";
import { cancel, overOf, resume, whyNoTurn } from "../state/turns.js";
import { deskOf } from "./desk.js";
import { TryIt } from "./example.js";

export function Turn({ desk }) {
  const { running, text, verb } = desk.turn.value;
  const view = desk.session.value;
  const isUnderWay = view.state === "paused" || (running && verb === "resume");
  return html`
    <section class="panel turn stack" aria-labelledby="turn-title">
      <h2 id="turn-title">Turn</h2>
      <${Failure} error=${overOf(view)} />
      ${isUnderWay
        ? html`<${Steps} desk=${desk} />`
        : html`<${Composer} view=${view} title=${null} buttons=${Start} />`}
      <p class="said mono" aria-live="polite">
        ${text || html`<span class="dim">What the turn generates appears here.</span>`}
      </p>
    </section>
  `;
}

function Start({ view, running }) {
  const busy = running || view.state !== "idle" ? "A turn runs. Wait for its end, or cancel it." : null;
  return html`<div class="row">
    <${Button} class="primary" type="submit" why=${busy ?? whyNoTurn.value} title="Ctrl+Enter">Start the turn<//>
    <${Button} why=${busy ? null : "No turn runs."} onClick=${() => attempt("Cancel", () => cancel(view.id))}>Cancel<//>
    ${view.tokens === 0 && html`<${TryIt} desk=${deskOf(view.id)} why=${busy ?? whyNoTurn.value} />`}
  </div>`;
}

/** Buttons that take a paused turn further. */
function Steps({ desk }) {
  const { checkpoint, state } = desk.session.value;
  const { running, error } = desk.turn.value;
  const isAfter = !checkpoint || checkpoint.point === AFTER;
  const layer = (checkpoint?.layer ?? 0) - (isAfter ? 0 : 1); // the last one that the pass is through with
  const last = server.value.num_layers - 1;
  const busy = running || state !== "paused" ? "The turn runs. Wait for its next pause." : whyNoTurn.value;
  const atEnd = checkpoint && layer === last ? "This is the last layer: go on to the next token." : null;
  const resuming = (until) => () => [["POST", `/v1/sessions/${desk.id}/resume`, { body: { until } }]];
  const step = (until) => () => resume(desk.id, until);
  return html`
    <div class="row" role="group" aria-label="Go on">
      <${Button} class="primary" why=${busy ?? atEnd} onClick=${step({ layer: layer + 1 })}>${isAfter ? "Next layer" : "After this layer"}<//>
      <${ToLayer} layer=${layer} last=${last} why=${busy ?? atEnd} go=${(k) => resume(desk.id, { layer: k })} />
      <${Button} why=${busy} onClick=${step("next_token")} title="The same place, for the next token">Next token<//>
      <${Button} why=${busy} onClick=${step(null)} title="Or the end, if there is none">Next breakpoint<//>
      <${Button} why=${busy} onClick=${step("end")} title="Past every breakpoint that pauses">To the end<//>
      <${Button} class="danger" onClick=${() => attempt("Cancel", () => cancel(desk.id))}>Cancel the turn<//>
      <${CopyAs} of=${{ "next layer": resuming({ layer: Math.min(layer + 1, last) }), "next token": resuming("next_token"), "next breakpoint": resuming(), "to the end": resuming("end") }} />
    </div>
    <${Failure} error=${error} />
  `;
}

function ToLayer({ layer, last, why, go }) {
  const [chosen, choose] = useState(null);
  const layers = Array.from({ length: last - layer }, (_, at) => layer + 1 + at);
  const to = layers.includes(chosen) ? chosen : last;
  return html`<span class="row tight">
    <${Button} why=${why} onClick=${() => go(to)}>To layer<//>
    <select aria-label="Layer to go to" value=${to} onChange=${(event) => choose(Number(event.target.value))}>
      ${layers.length === 0 && html`<option value=${last}>${last}</option>`}
      ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
    </select>
  </span>`;
}

const SHOWN = 60;
const EVERY_MS = 2000;

/** What all others do meanwhile: a pause stops nobody else. */
export function Throughput({ id }) {
  const shown = samples.value.slice(-SHOWN);
  const last = shown.at(-1)?.view;
  const isOperator = Boolean(last?.counts); // others are told of their own sessions only
  const rate = useRate(isOperator && connection.value.state === "live");
  const others = shown.map(({ running }) => running.filter((each) => each !== id).length);
  return html`
    <section class="panel throughput stack" aria-labelledby="others-title">
      <h2 id="others-title">Others meanwhile</h2>
      <p><b>${last ? counted(others.at(-1), "turn") : "…"}</b> running</p>
      <p title="Computed by the whole server, prompts included">
        ${rate === null
          ? html`<span class="dim">${last && !isOperator ? "not shown to this key:" : "…"} tokens/s</span>`
          : html`<b>${number(Math.round(rate))}</b> tokens/s`}
      </p>
      <${Sparkline} values=${others} />
    </section>
  `;
}

/** Tokens per second of the whole server; null where the caller may not read them, or the server is away. */
function useRate(isAllowed) {
  const [rate, setRate] = useState(null);
  useEffect(() => {
    if (!isAllowed) return undefined;
    const leaving = new AbortController();
    let before = {};
    const look = async () => {
      const tokens = await tokensComputed(leaving.signal).catch(() => NaN);
      if (leaving.signal.aborted) return;
      const now = performance.now();
      const fresh = (1000 * (tokens - before.tokens)) / (now - before.now);
      setRate(fresh >= 0 ? fresh : null);
      before = { tokens, now };
    };
    const timer = setInterval(look, EVERY_MS);
    return () => {
      leaving.abort();
      clearInterval(timer);
      setRate(null);
    };
  }, [isAllowed]);
  return rate;
}

function Sparkline({ values }) {
  const high = Math.max(1, ...values);
  const path = pathOf(values, (at) => SHOWN - values.length + at, (value) => 30 - (28 * value) / high);
  return html`<svg class="chart sparkline" viewBox="0 0 ${SHOWN} 32" preserveAspectRatio="none" role="img"
    aria-label="Other turns running over the last minute, at most ${Math.max(0, ...values)}">
    <path class="line" d=${path} />
  </svg>`;
}

/** Tokens that the server has computed since its start. Throws `ApiError` where the caller may not read the metrics. */
async function tokensComputed(signal) {
  const text = await (await open("/metrics", { signal })).text();
  return Number(/^djinn_step_tokens_total (\S+)$/m.exec(text)?.[1] ?? 0);
}
