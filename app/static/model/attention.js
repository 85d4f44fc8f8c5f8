// Where the heads of a layer look: a small picture for each, and one of them with its tokens.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, download, need } from "../lib/api.js";
import { percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { read } from "../lib/safetensors.js";
import { visible } from "../lib/tokens.js";
import { Button, Failure, useAction } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { points } from "../state/points.js";
import { heed, isInside, tell } from "../state/route.js";
import { arm, capturing, disarm } from "./arming.js";

export function Attention({ desk }) {
  const { busy, error, act } = useAction();
  const layers = points.value.filter(({ name }) => name === "pattern").flatMap((each) => each.layers);
  const [chosen, choose] = useState(null);
  const [found, setFound] = useState(null);
  const [number, setNumber] = useState(null);
  const show = (at, head = null) => act(async () => {
    setFound(await readHeads(desk.id, at));
    pick(at, head);
  });
  const pick = (at, head) => {
    setNumber(head);
    if (isInside(desk.id)) tell({ head: `${at},${head ?? 0}` });
  };
  useEffect(() => heed((said) => {
    const [at, head] = (said.get("head") ?? "none").split(",").map(Number);
    if (!layers.includes(at) || desk.session.peek().tokens === 0) return;
    choose(at);
    show(at, head);
  }), [layers.length]);
  if (layers.length === 0) return null;
  const layer = chosen ?? layers[layers.length >> 1];
  const watching = (desk.breakpoints.value ?? []).filter((each) => each.point === "pattern" && each.layers.includes(layer));
  const watch = () => act(() => (watching.length ? disarm(desk, watching) : arm(desk, capturing(desk, { layer, point: "pattern" }))));
  const wait = busy ? "One moment" : null;
  const empty = desk.session.value.tokens === 0 ? "The session has no tokens yet: start a turn." : null;
  const head = found?.heads.find((each) => each.number === number) ?? found?.heads[0];
  return html`
    <section class="panel attention stack" aria-labelledby="attention-title">
      <h2 id="attention-title">Where heads look</h2>
      <div class="row">
        <label>Layer <select value=${layer} onChange=${(event) => choose(Number(event.target.value))}>
          ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>
        <${Button} class="primary" why=${wait ?? empty} onClick=${() => show(layer)}>Show them<//>
        <label><input type="checkbox" checked=${watching.length > 0} disabled=${busy} onChange=${watch} />
          Watch the heads of this layer</label>
        <${CopyAs} of=${{
          "the heads that are shown": () => [(need(found, { message: "show them first" }), found.asked)],
          "the watch": () => [capturing(desk, { layer, point: "pattern" })],
        }} />
      </div>
      <${Failure} error=${error} />
      ${found === null && html`<p class="dim" role="status">
        Each head shows, row by row, how much each token looks at those before it. Watched, a turn is shown as it was, with all
        its edits; else the tokens are read again, without.
      </p>`}
      ${found && html`
        <p role="status">Layer ${found.layer}, ${found.isWatched ? "as captured" : "read again, without edits"}. Choose a head.</p>
        <div class="heads-grid">${found.heads.map((each) => html`<button key=${each.number} type="button" aria-pressed=${each === head}
          onClick=${() => pick(found.layer, each.number)}><${Pattern} head=${each} /><span>Head ${each.number}</span></button>`)}</div>
        <${HeadLooks} key=${`${found.layer} ${head.number}`} head=${head} texts=${found.texts} />`}
    </section>
  `;
}

/** `{layer, heads, texts, isWatched, asked}` of a session: what was captured of the layer's patterns, or else what its tokens have there
 * when they are read again. `asked` is the call that has told them. */
async function readHeads(id, layer) {
  const { token_ids, pieces } = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } });
  const kept = ["GET", `/v1/sessions/${id}/captures`, { query: { point: "pattern", layer }, out: OUT }];
  const captured = headsOf(await download(...kept), ({ told }) => JSON.parse(told));
  if (captured.length) return { layer, heads: captured, texts: pieces, isWatched: true, asked: kept };
  return { layer, heads: await readAgain(token_ids, layer), texts: pieces, isWatched: false, asked: reading(token_ids, layer) };
}

const OUT = "patterns.safetensors";
const reading = (prompt, layer) => ["POST", "/v1/experiments/activations", { body: { prompts: [prompt], points: ["pattern"], layers: [layer] }, out: OUT }];

/** The heads of a layer over a prompt, which is a text or token ids. */
export const readAgain = async (prompt, layer) =>
  headsOf(await download(...reading(prompt, layer)), ({ shape }) => ({ positions: [...Array(shape.at(-3)).keys()] }));

/** Positions that are drawn: the last ones, so that a cell can be seen. */
const MOST = 256;

/** The heads of a file with patterns: `{number, first, end, rows}` of each. `rows` has, by position, the share of each key.
 * `about` answers `{positions, heads}` of a tensor, which may lack `heads`; later passes take the place of those before. */
function headsOf(file, about) {
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
const lookedAt = ({ rows }, query) =>
  [...(rows.get(query) ?? [])].map((share, key) => ({ key, share })).sort((one, other) => other.share - one.share);

/** A cell for each query and key; the darker, the more. */
function Pattern({ head }) {
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
    <div class="stack">
      <p role="status">${code(query)} looks at ${top.map(({ key, share }, at) => html`${at > 0 && ", "}${code(key)} <b>${percent(share)}</b>`)}</p>
      <p class="seen mono">${texts.slice(head.first, head.end).map((text, at) => {
        const position = head.first + at;
        return html`<button key=${position} type="button" class="seen-token" aria-pressed=${position === query} title="position ${position}: ${percent(shares?.[position] ?? 0)}"
          style=${{ "--p": `${Math.round(100 * (shares?.[position] ?? 0))}%` }} onClick=${() => ask(position)}>${visible(text)}</button>`;
      })}</p>
      <p class="dim">Choose a token to see what it looks at. In the picture each row is a token, each column one that it can see.</p>
    </div>
    <${Pattern} head=${head} />
  </div>`;
}
