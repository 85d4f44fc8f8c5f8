// The end of a conversation: what this page has sent and got since, what another client runs, or that there is nothing.
import { counted } from "../lib/format.js";
import { html } from "../lib/html.js";
import { drawn } from "./chunk.js";

export function Streamed({ turn, view, isEmpty }) {
  if (turn.running) return html`<${Own} turn=${turn} />`;
  if (view.state === "running" || view.state === "queued") {
    return html`<p class="beyond dim" role="status">Another client runs a turn: ${counted(view.tokens, "token")} so far.
      They appear at its end.</p>`;
  }
  return isEmpty && html`<p class="beyond dim">Nothing yet. Write a prompt below, or let a client send one.</p>`;
}

const Own = ({ turn }) => html`
  ${turn.sent && html`<span class="sent">${drawn(turn.sent)}</span>`}
  ${turn.pieces.map(({ ids, text }, index) => html`<span key=${index} class="token generated"
    title=${`id ${ids.join(", ")}`}>${drawn(text)}</span>`)}
  <span class="caret" aria-hidden="true" />
`;
