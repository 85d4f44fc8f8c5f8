// A window of a session's tokens: the last ones, or those around a position. The arrow keys choose a token.
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { number, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { picture } from "../lib/tokens.js";
import { isIn } from "../state/history.js";
import { turnOf } from "../state/turns.js";

const CHUNK = 200;
/** Most tokens that are drawn at once. */
const WINDOW = 10 * CHUNK;
const NEAR_PX = 40;

/** `chosen` is the signal of `{position, pinned}`, or null: the token under the pointer, or the one that was clicked or
 * walked to. */
export function TokenWindow({ view, tokens: known, marks, chosen, boundaries }) {
  const from = useSignal(null); // the first token of the window; null: as many as it holds, up to the last
  const box = useRef(null);
  const turn = turnOf(view.id).value;
  const tokens = turn.running ? known.slice(0, turn.from) : known; // its own stand behind them
  const last = Math.max(0, Math.ceil((tokens.length - WINDOW) / CHUNK) * CHUNK);
  const first = Math.min(from.value ?? last, last);
  const end = first === last ? tokens.length : first + WINDOW;
  const show = (position) => (from.value = position >= last ? null : Math.floor(position / CHUNK) * CHUNK);
  const choose = (position) => {
    if (position < first || position >= end) show(Math.max(0, position - WINDOW / 2));
    chosen.value = { position, pinned: true };
  };
  useFollowing(box, first === last, [tokens, turn]);
  useInSight(box, chosen.value);
  const onKeyDown = (event) => {
    const next = stepOf(event, chosen.value?.position ?? null, tokens.length);
    if (next === null) return;
    event.preventDefault();
    if (next === "use") document.getElementById("rewind-here")?.focus();
    else if (next === "leave") chosen.value = null;
    else choose(next);
  };
  return html`
    <div ref=${box} class=${`tokens${boundaries ? " boundaries" : ""}`} tabindex="0" role="group"
      aria-label="Tokens: left and right choose one, Enter goes to its button" onKeyDown=${onKeyDown}
      onMouseOver=${(event) => point(chosen, tokenAt(event))} onMouseLeave=${() => point(chosen, null)}
      onClick=${(event) => isOfToken(event) && choose(tokenAt(event))}>
      ${first > 0 && html`<${Earlier} first=${first} size=${WINDOW} show=${show} />`}
      ${startsOf(first, end).map((start) => html`<${Chunk} key=${start} tokens=${tokens} marks=${marks} first=${start}
        chosen=${within(chosen.value, start)} />`)}
      ${end < tokens.length && html`<${Later} end=${end} length=${tokens.length} size=${WINDOW} show=${show} />`}
      ${end === tokens.length && html`<${Streamed} turn=${turn} view=${view} shown=${tokens.length} />`}
    </div>
  `;
}

/** What the pointer is over, unless a token has been clicked. */
function point(chosen, position) {
  if (chosen.value?.pinned) return;
  if (position !== (chosen.value?.position ?? null)) chosen.value = position === null ? null : { position, pinned: false };
}

function startsOf(first, end) {
  const starts = [];
  for (let start = first; start < end; start += CHUNK) starts.push(start);
  return starts;
}

const within = (chosen, start) =>
  chosen && chosen.position >= start && chosen.position < start + CHUNK ? chosen.position : null;

/** Stay at the end while it grows, for one who is there. */
function useFollowing(box, isLast, grown) {
  const atEnd = useRef(true);
  useLayoutEffect(() => {
    const { current } = box;
    const note = () => (atEnd.current = current.scrollHeight - current.scrollTop - current.clientHeight < NEAR_PX);
    current.addEventListener("scroll", note, { passive: true });
    return () => current.removeEventListener("scroll", note);
  }, []);
  useLayoutEffect(() => {
    if (isLast && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, grown);
}

function useInSight(box, chosen) {
  useLayoutEffect(() => {
    if (chosen?.pinned) box.current.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
}

const Earlier = ({ first, size, show }) => html`
  <p class="beyond">
    <button onClick=${() => show(Math.max(0, first - size / 2))}>Earlier tokens</button>
    <button onClick=${() => show(0)}>From the first</button>
    <span class="dim">${number(first)} before these</span>
  </p>
`;

const Later = ({ end, length, size, show }) => html`
  <p class="beyond">
    <button onClick=${() => show(end - size / 2)}>Later tokens</button>
    <button onClick=${() => show(length)}>To the last</button>
    <span class="dim">${number(length - end)} after these</span>
  </p>
`;

const FAR = 10;

/** The position of the token of an event, or null. */
function tokenAt(event) {
  const token = event.target.closest("[data-position]");
  return token === null ? null : Number(token.dataset.position);
}

const isOfToken = (event) => tokenAt(event) !== null;

/** Where a key leads from a position (null: none is chosen): a position, `use`, `leave`, or null for any other key. */
function stepOf(event, position, length) {
  if (length === 0 || event.ctrlKey || event.metaKey || event.altKey || event.target !== event.currentTarget) return null;
  const step = event.shiftKey ? FAR : 1;
  const clamp = (to) => Math.min(Math.max(to, 0), length - 1);
  const steps = {
    ArrowLeft: clamp((position ?? length) - step),
    ArrowRight: clamp((position ?? length - 2) + step),
    Home: 0,
    End: length - 1,
    ...(position !== null && { Enter: "use", Escape: "leave" }),
  };
  return steps[event.key] ?? null;
}

/** The tokens from `first` on, at most `CHUNK`. `chosen` is a position, or null where it is in another chunk. */
function Chunk({ tokens, marks, first, chosen }) {
  const key = JSON.stringify(marks);
  return useMemo(
    () => html`<span>${tokens.slice(first, first + CHUNK).map((token, index) => {
      const position = first + index;
      return html`<${Token} token=${token} position=${position} kind=${kindOf(marks, position)} chosen=${chosen === position} />`;
    })}</span>`,
    [tokens[first], tokens[Math.min(first + CHUNK, tokens.length) - 1], key, chosen], // what stays is the same object
  );
}

const Token = ({ token, position, kind, chosen }) => html`
  ${token.role && html`<b class="role">${token.role}</b>`}
  <span data-position=${position} class=${`token ${kind}${token.special ? " special" : ""}${chosen ? " chosen" : ""}`}
    ...${odds(token.chance)}>${drawn(token.text)}</span>
`;

/** A line below a token: the less probable it was, the stronger. */
const odds = (chance) => chance !== null && { title: percent(chance), style: { "--odd": `${100 * (1 - chance)}%` } };

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

function Streamed({ turn, view, shown }) {
  if (turn.running) return html`<${Own} turn=${turn} />`;
  if (view.state === "running") return CARET;
  return shown === 0 && view.state === "idle" && html`<p class="beyond dim">Nothing yet. Write a prompt below, or let a client send one.</p>`;
}

const CARET = html`<span class="caret" aria-hidden="true" />`;

const Own = ({ turn }) => html`
  ${turn.sent && html`<span class="sent">${drawn(turn.sent)}</span>`}
  ${turn.pieces.map(({ text, chance }, index) => html`<span key=${index} class="token generated" ...${odds(chance)}>${drawn(text)}</span>`)}
  ${CARET}
`;
