// Where a head of attention looks: a picture of queries by keys, and the prompt with what one token of it sees.
import { useEffect, useRef, useState } from "preact/hooks";
import { percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { read } from "../lib/safetensors.js";
import { visible } from "../lib/tokens.js";

/** Positions that are drawn: the last ones, so that a cell can be seen. */
const MOST = 256;

/** The heads of a file with patterns: `{number, first, end, rows}` of each. `rows` has, by position, the share of each key.
 * `about` answers `{positions, heads}` of a tensor, which may lack `heads`; later passes take the place of those before. */
export function headsOf(file, about) {
  const heads = new Map();
  for (const tensor of read(file)) {
    const [count, keys] = tensor.shape.slice(-2);
    const { positions, heads: numbers } = about(tensor);
    for (let at = 0; at < count; at++) {
      const number = numbers?.[at] ?? at;
      if (!heads.has(number)) heads.set(number, new Map());
      positions.forEach((position, row) => {
        const start = (row * count + at) * keys;
        heads.get(number).set(position, tensor.values.subarray(start, start + keys));
      });
    }
  }
  return [...heads].sort(([one], [other]) => one - other).map(([number, rows]) => {
    const end = Math.max(...rows.keys()) + 1;
    return { number, first: Math.max(0, end - MOST), end, rows };
  });
}

/** What a query looks at, most first: `{key, share}`. */
export const lookedAt = ({ rows }, query) =>
  [...(rows.get(query) ?? [])].map((share, key) => ({ key, share })).sort((one, other) => other.share - one.share);

/** A cell for each query and key; the darker, the more. */
export function Pattern({ head }) {
  const canvas = useRef(null);
  useEffect(() => draw(canvas.current, head), [head]);
  const { number, end } = head;
  const [most] = lookedAt(head, end - 1);
  const said = `Head ${number}: position ${end - 1} looks most at position ${most.key}, ${percent(most.share)}`;
  return html`<canvas ref=${canvas} role="img" aria-label=${said} title=${said}></canvas>`;
}

function draw(canvas, { first, end, rows }) {
  canvas.width = canvas.height = end - first;
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(canvas).color;
  for (const [position, shares] of rows) {
    for (let key = first; key <= position; key++) {
      context.globalAlpha = shares[key];
      context.fillRect(key - first, position - first, 1, 1);
    }
  }
}

/** A head with its prompt: a token is chosen, and the others are as dark as it looks at them. `texts` are those of all tokens. */
export function HeadLooks({ head, texts }) {
  const [asked, ask] = useState(null);
  const query = asked !== null && asked < head.end ? asked : head.end - 1;
  const shares = head.rows.get(query);
  const top = lookedAt(head, query).slice(0, 3);
  const code = (position) => html`<code>${visible(texts[position] ?? "")}</code>`;
  return html`<div class="head-looks">
    <${Pattern} head=${head} />
    <div class="stack">
      <p role="status">${code(query)} looks at ${top.map(({ key, share }, at) => html`${at > 0 && ", "}${code(key)} <b>${percent(share)}</b>`)}</p>
      <p class="seen mono">${texts.slice(head.first, head.end).map((text, at) => {
        const position = head.first + at;
        return html`<button key=${position} type="button" class="seen-token" aria-pressed=${position === query} title="position ${position}: ${percent(shares?.[position] ?? 0)}"
          style=${{ "--p": `${Math.round(100 * (shares?.[position] ?? 0))}%` }} onClick=${() => ask(position)}>${visible(text)}</button>`;
      })}</p>
      <p class="dim">Choose a token to see what it looks at. In the picture each row is a token, each column one that it can see.</p>
    </div>
  </div>`;
}
