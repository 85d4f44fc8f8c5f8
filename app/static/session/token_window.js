// A window of a session's tokens: the last ones, or those around a position. The arrow keys choose a token.
import { useLayoutEffect, useRef } from "preact/hooks";
import { useSignal } from "@preact/signals";
import { number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Chunk, CHUNK, Streamed } from "./chunk.js";
import { turnOf } from "../state/turns.js";

/** Most tokens that are drawn at once. */
const WINDOW = 10 * CHUNK;
const NEAR_PX = 40;

/** `chosen` is the signal of `{position, pinned}`, or null: the token under the pointer, or the one that was clicked or
 * walked to. */
export function TokenWindow({ view, tokens, marks, chosen, boundaries }) {
  const from = useSignal(null); // the first token of the window; null: as many as it holds, up to the last
  const box = useRef(null);
  const turn = turnOf(view.id).value;
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
      ${end === tokens.length && html`<${Streamed} turn=${turn} view=${view} isEmpty=${tokens.length === 0} />`}
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
