// Draws tokens: runs of the history, and those of a turn that is under way.
import { useMemo } from "preact/hooks";
import { counted } from "../lib/format.js";
import { html } from "../lib/html.js";
import { picture } from "../lib/tokens.js";
import { isIn } from "../state/history.js";

export const CHUNK = 200;

/** The tokens from `first` on, at most `CHUNK`. `chosen` is a position, or null where it is in another chunk. */
export function Chunk({ tokens, marks, first, chosen }) {
  const key = JSON.stringify(marks);
  return useMemo(
    () => html`<span>${tokens.slice(first, first + CHUNK).map((token, index) => {
      const position = first + index;
      return html`<${Token} token=${token} position=${position} kind=${kindOf(marks, position)} chosen=${chosen === position} />`;
    })}</span>`,
    [tokens, key, first, chosen],
  );
}

const Token = ({ token, position, kind, chosen }) => html`
  <span data-position=${position} class=${`token ${kind}${token.special ? " special" : ""}${chosen ? " chosen" : ""}`}
  >${drawn(token.text)}</span>
`;

const kindOf = (marks, position) =>
  Object.keys(marks).filter((name) => isIn(marks[name], position)).join(" ");

/** A text with its line ends and other control characters drawn. A token may be a part of a character only: then it has
 * no text. */
function drawn(text) {
  if (text === "") return html`<span class="sign" aria-hidden="true">·</span>`;
  if (!CONTROLS.test(text)) return text;
  return text.split(CONTROLS).map((part, index) => (index % 2 ? html`<span class="sign" aria-hidden="true">${part === "\n" ? "↵\n" : picture(part)}</span>` : part));
}

const CONTROLS = /([\x00-\x08\x0a-\x1f\x7f])/;

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
