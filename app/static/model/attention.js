// Where the heads of a layer look: a small picture for each, and one of them with its tokens.
import { useState } from "preact/hooks";
import { call, download } from "../lib/api.js";
import { called, pythonIn } from "../lib/code.js";
import { html } from "../lib/html.js";
import { Button, Failure, useAction } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { points } from "../state/points.js";
import { capture, disarm } from "./arming.js";
import { HeadLooks, headsOf, Pattern } from "./pattern.js";

export function Attention({ desk }) {
  const { busy, error, act } = useAction();
  const layers = points.value.filter(({ name }) => name === "pattern").flatMap((each) => each.layers);
  const [chosen, choose] = useState(null);
  const [found, setFound] = useState(null);
  const [number, setNumber] = useState(null);
  if (layers.length === 0) return null;
  const layer = chosen ?? layers[layers.length >> 1];
  const watching = (desk.breakpoints.value ?? []).filter((each) => each.point === "pattern" && each.layers.includes(layer));
  const watch = () => act(() => (watching.length ? disarm(desk, watching) : capture(desk, { layer, point: "pattern" })));
  const wait = busy ? "One moment" : null;
  const empty = desk.session.value.tokens === 0 ? "The session has no tokens yet: start a turn." : null;
  const head = found?.heads.find((each) => each.number === number) ?? found?.heads[0];
  const body = { layer, point: "pattern", action: "capture" };
  return html`
    <section class="panel attention stack" aria-labelledby="attention-title">
      <h2 id="attention-title">Where heads look</h2>
      <div class="row">
        <label>Layer <select value=${layer} onChange=${(event) => choose(Number(event.target.value))}>
          ${layers.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>
        <${Button} class="primary" why=${wait ?? empty} onClick=${() => act(async () => setFound(await readHeads(desk.id, layer)))}>Show them<//>
        <label><input type="checkbox" checked=${watching.length > 0} disabled=${busy} onChange=${watch} />
          Watch the heads of this layer</label>
        <${CopyAs} what="the heads of layer ${layer}" python=${() => pythonIn(desk.id, called("session.capture_at", [], { layer, point: "pattern" }),
          "# after a turn:", called("session.captures", [], { point: "pattern", layer }))}
          calls=${() => [["POST", `/v1/sessions/${desk.id}/breakpoints`, body], ["GET", `/v1/sessions/${desk.id}/captures?point=pattern&layer=${layer}`, undefined, "patterns.safetensors"]]} />
      </div>
      <${Failure} error=${error} />
      ${found === null && html`<p class="dim" role="status">
        Each head shows, row by row, how much each token looks at those before it. Watched, a turn is shown as it was, with all
        its edits; else the tokens are read again, without.
      </p>`}
      ${found && html`
        <p role="status">Layer ${found.layer}, ${found.isWatched ? "as captured" : "read again, without edits"}. Choose a head.</p>
        <div class="heads-grid">${found.heads.map((each) => html`<button key=${each.number} type="button" aria-pressed=${each === head}
          onClick=${() => setNumber(each.number)}><${Pattern} head=${each} /><span>Head ${each.number}</span></button>`)}</div>
        <${HeadLooks} key=${`${found.layer} ${head.number}`} head=${head} texts=${found.texts} />`}
    </section>
  `;
}

/** `{layer, heads, texts, isWatched}` of a session: what was captured of the layer's patterns, or else what its tokens have there
 * when they are read again. */
async function readHeads(id, layer) {
  const { token_ids, pieces } = await call("GET", `/v1/sessions/${id}/history`, { query: { pieces: true } });
  const captured = headsOf(await download(`/v1/sessions/${id}/captures?point=pattern&layer=${layer}`), ({ told }) => JSON.parse(told));
  if (captured.length) return { layer, heads: captured, texts: pieces, isWatched: true };
  return { layer, heads: await readAgain(token_ids, layer), texts: pieces, isWatched: false };
}

/** The heads of a layer over a prompt, which is a text or token ids. */
export async function readAgain(prompt, layer) {
  const body = { prompts: [prompt], points: ["pattern"], layers: [layer] };
  const file = await download("/v1/experiments/activations", body);
  return headsOf(file, ({ shape }) => ({ positions: [...Array(shape.at(-3)).keys()] }));
}
