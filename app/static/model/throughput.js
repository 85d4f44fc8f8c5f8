// What all others do meanwhile: a pause stops nobody else.
import { useEffect, useState } from "preact/hooks";
import { open } from "../lib/api.js";
import { counted, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { pathOf } from "../lib/paths.js";
import { connection } from "../state/connection.js";
import { samples } from "../state/memory.js";

const SHOWN = 60;
const EVERY_MS = 2000;

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
