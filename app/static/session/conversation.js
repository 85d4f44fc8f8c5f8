// The tokens of a session, and what is known of the one that is chosen.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { counted } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Failure, Loading } from "../shell/states.js";
import { happeningsOf } from "../state/happenings.js";
import { historyOf, loadHistory } from "./history.js";
import { marksOf } from "./marks.js";
import { TokenBar } from "./token_bar.js";
import { TokenWindow } from "./token_window.js";
import { turnOf } from "./turn.js";

export function Conversation({ view }) {
  const { tokens, error } = historyOf(view.id).value;
  const chosen = useSignal(null);
  const boundaries = useSignal(false);
  useFreshHistory(view, tokens);
  const marks = marksOf(happeningsOf(view.id).value, view.usage.last_turn, tokens?.length ?? 0);
  return html`
    <section class="panel conversation" aria-labelledby="conversation">
      <div class="row">
        <h2 id="conversation">Conversation</h2>
        <span class="dim number">${counted(view.tokens, "token")}</span>
        <${Legend} marks=${marks} />
        <label class="check"><input type="checkbox" checked=${boundaries.value}
          onChange=${(event) => (boundaries.value = event.target.checked)} />Show tokens</label>
      </div>
      ${error && html`<${Failure} error=${error} retry=${() => loadHistory(view.id)} />`}
      ${tokens === null
        ? !error && html`<${Loading} what="the tokens" class="tokens" />`
        : html`<${TokenWindow} view=${view} tokens=${tokens} marks=${marks} chosen=${chosen} boundaries=${boundaries.value} />`}
      <${TokenBar} view=${view} tokens=${tokens ?? []} marks=${marks} chosen=${chosen} />
    </section>
  `;
}

/** Asks for the history where it is not the one that the view tells of. While this page runs the turn, its tokens come
 * by themselves. */
function useFreshHistory(view, tokens) {
  const ends = happeningsOf(view.id).value.filter(isEnd).length;
  const own = turnOf(view.id).value.running;
  const isMoving = view.state === "queued" || view.state === "running";
  useEffect(() => void (own || loadHistory(view.id)), [ends]);
  useEffect(() => {
    if (!own && !isMoving && tokens !== null && tokens.length !== view.tokens) loadHistory(view.id);
  }, [view.tokens, isMoving]);
}

const isEnd = ({ name, data }) => name === "pause" || (name === "turn" && data.status !== "begun");

function Legend({ marks }) {
  const known = ["generated", "cached", "recomputed"].filter((name) => marks[name].some(([first, end]) => end > first));
  return html`<ul class="legend" aria-label="How tokens are drawn">
    ${known.map((name) => html`<li key=${name}><span class="sample ${name}" aria-hidden="true">ab</span>${LEGEND[name]}</li>`)}
  </ul>`;
}

const LEGEND = { generated: "generated", cached: "cached in the last turn", recomputed: "computed again in the last turn" };
