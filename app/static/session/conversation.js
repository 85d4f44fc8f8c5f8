// The tokens of a session, and what is known of the one that is chosen.
import { useEffect, useState } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { call } from "../lib/api.js";
import { counted, number, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Confirm } from "../shell/dialog.js";
import { Failure, Loading } from "../shell/controls.js";
import { happeningsOf, isSeen, lastOf } from "../state/happenings.js";
import { historyOf, isIn, loadHistory, marksOf } from "../state/history.js";
import { TokenWindow } from "./token_window.js";
import { turnOf } from "../state/turns.js";

export function Conversation({ view }) {
  const { tokens, error } = historyOf(view.id).value;
  const chosen = useSignal(null);
  const boundaries = useSignal(false);
  useFreshHistory(view, tokens);
  const paused = view.state === "paused" ? turnOf(view.id).value.usage : null;
  const marks = marksOf(happeningsOf(view.id).value, view.usage.last_turn, paused, tokens?.length ?? 0);
  return html`
    <section class="panel conversation stack" aria-labelledby="conversation">
      <div class="row">
        <h2 id="conversation">Conversation</h2>
        <span class="dim number">${counted(view.tokens, "token")}</span>
        <${Legend} marks=${marks} />
        <label class="check"><input type="checkbox" checked=${boundaries.value}
          onChange=${(event) => (boundaries.value = event.target.checked)} />Show tokens</label>
      </div>
      <${Failure} error=${error} retry=${() => loadHistory(view.id)} />
      ${tokens === null
        ? !error && html`<${Loading} what="the tokens" class="tokens" />`
        : html`<${TokenWindow} view=${view} tokens=${tokens} marks=${marks} chosen=${chosen} boundaries=${boundaries.value} />`}
      <${TokenBar} view=${view} tokens=${tokens ?? []} marks=${marks} chosen=${chosen} />
    </section>
  `;
}

/** Asks for the history where it is not the one that the view tells of: views of two changes may come as one. Of a turn
 * that runs it asks for what is new, and while this page runs the turn, its tokens come by themselves. */
function useFreshHistory(view, tokens) {
  const change = lastOf(happeningsOf(view.id).value, isChange);
  const own = turnOf(view.id).value.running;
  const isMoving = view.state === "queued" || view.state === "running";
  useEffect(() => void ((own && tokens !== null) || loadHistory(view.id)), [change]);
  useEffect(() => {
    const missing = own || tokens === null ? 0 : view.tokens - tokens.length;
    if (isMoving ? missing > 0 : missing) loadHistory(view.id, isMoving);
  }, [view, own, tokens?.length]);
}

/** Whether the tokens that were known may be others since: a turn may begin with a history of its own. */
const isChange = (happening) => isSeen(happening) || ["pause", "turn"].includes(happening.name);

function Legend({ marks }) {
  const known = KINDS.filter((name) => marks[name].some(([first, end]) => end > first));
  return html`<ul class="legend" aria-label="How tokens are drawn">
    ${known.map((name) => html`<li key=${name}><span class="sample ${name}" aria-hidden="true">ab</span>${name}${name !== "generated" && " in the last turn"}</li>`)}
  </ul>`;
}

const KINDS = ["generated", "cached", "recomputed"];

function TokenBar({ view, tokens, marks, chosen }) {
  const [asked, ask] = useState(null);
  const position = chosen.value?.position ?? null;
  const token = position === null ? undefined : tokens[position];
  const why = whyNot(view, token);
  return html`
    <div class="token-bar row">
      <p aria-live="polite">${token ? html`<${About} token=${token} position=${position} marks=${marks} />`
        : html`<span class="dim">Point at a token, or press ← and → among them, to see its position, id and text.</span>`}</p>
      <button id="rewind-here" disabled=${why !== null} title=${why ?? "Drops this token and all after it"}
        onClick=${() => ask(position)}>Rewind to here</button>
    </div>
    ${asked !== null && html`<${Confirm} title=${`Rewind to position ${number(asked)}?`}
      action=${`Drop ${counted(tokens.length - asked, "token")}`} onClose=${() => ask(null)}
      run=${() => rewind(view.id, asked, chosen)}>
      The session forgets what stands from position ${number(asked)} on. A fork made before keeps it.
    <//>`}
  `;
}

const About = ({ token, position, marks }) => html`
  Position <b class="number">${number(position)}</b> · id <b class="number">${token.id}</b> ·
  text <code>${JSON.stringify(token.text)}</code>${token.special && " · special"}${token.chance !== null && ` · ${percent(token.chance)}`}
  ${KINDS.filter((name) => isIn(marks[name], position)).map((name) => ` · ${name}`)}
`;

function whyNot({ state }, token) {
  if (token === undefined) return "Choose a token first";
  return state === "idle" ? null : `Its turn is ${state}: only a session without a turn can be rewound`;
}

async function rewind(id, to_token, chosen) {
  await call("POST", `/v1/sessions/${id}/rewind`, { body: { to_token } });
  chosen.value = null;
  await loadHistory(id);
}
