// The screen of one session: its parts, which session it is, what must not be overlooked, its figures and its forks.
import { second } from "../lib/clock.js";
import { ago, bytes, counted, nameOf, number, place, positions, seconds, shortId, until, waits } from "../lib/format.js";
import { html } from "../lib/html.js";
import { bytesIn, bytesOf, TIERS } from "../sessions/looks.js";
import { Failure, Named } from "../shell/controls.js";
import { CloseButton } from "../shell/dialog.js";
import { isAway, server } from "../state/connection.js";
import { historyOf } from "../state/history.js";
import { where } from "../state/points.js";
import { linkTo } from "../state/route.js";
import { ids, sessionOf, turnWord } from "../state/sessions.js";
import { overOf } from "../state/turns.js";
import { Actions } from "./actions.js";
import { Breakpoints } from "./breakpoints.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { Timeline } from "./timeline.js";

export function SessionScreen({ id }) {
  const view = sessionOf(id).value;
  const foreign = isForeign(view);
  const over = overOf(view);
  return html`
    <div class="session">
      <div class="over stack"><${Heading} view=${view} />
      ${view.checkpoint ? html`<${PauseBanner} view=${view} />` : over && html`<div class="paused panel"><${Failure} error=${over} /></div>`}</div>
      <div class="talk stack">
        ${foreign ? html`<${Foreign} view=${view} />` : html`<${Conversation} view=${view} /><${Composer} view=${view} />`}
      </div>
      <div class="side stack">
        ${!foreign && html`<${Actions} view=${view} />`}
        <${Facts} view=${view} />
        ${!foreign && html`<${Breakpoints} view=${view} />`}
        <${Forks} view=${view} />
      </div>
      <${Timeline} view=${view} />
    </div>
  `;
}

const Heading = ({ view }) => html`
  <header class="heading row">
    <h1 title=${view.id}>${nameOf(view) === shortId(view.id) && "Session "}<${Named} view=${view} /></h1>
    <span class=${`chip state-${view.state}`}>${turnWord(view)}</span>
    <span class=${`chip phase-${view.phase}`}>phase ${view.phase}</span>
    <span class=${`chip tier-${view.kv.tier ?? "none"}`}>KV ${place(view.kv)}</span>
    ${view.forked_from && html`<span class="chip">fork</span>`}
    ${Object.entries(view.metadata).filter(([name]) => name !== "name").map(([name, value]) => html`<span key=${name} class="chip">${name}: ${value}</span>`)}
  </header>
`;

function PauseBanner({ view }) {
  const { point, layer, pass } = view.checkpoint;
  const layers = server.value?.num_layers;
  return html`
    <section class="paused panel row" aria-label="Paused">
      <p><strong>Paused ${where(point, [layer])}${layers && ` of ${layers - 1}`}</strong>, at ${positions(view.checkpoint)} (${pass}). <span class="number"><${TimeLeft} ...${view.checkpoint} /></span></p>
      <a href=${linkTo(view.id, "model")}>Look inside the model</a>
    </section>
  `;
}

/** When a pause ends: people should not be surprised. Nothing if it does not end by itself, or while the server is away: it
 * may have taken the pause with it. */
export const TimeLeft = ({ expires_at: at }) => at && !isAway() && `It ends by itself in ${until(at)}.`;

/** Whether the server has refused to tell what the session holds. */
export const isForeign = ({ id, tenant }) => tenant !== null && historyOf(id).value.error?.status === 404;

export const Foreign = ({ view }) => html`
  <section class="panel stack" aria-labelledby="foreign">
    <h2 id="foreign">A session of another tenant</h2>
    <p>Only ${view.tenant} may read what it holds and use it. An operator sees its figures, and may close it.</p>
    <div class="row"><${CloseButton} view=${view} /></div>
  </section>
`;

function Facts({ view }) {
  void second.value; // time goes on
  const { usage, kv } = view;
  return html`
    <section class="panel facts stack" aria-labelledby="facts">
      <h2 id="facts">Facts</h2>
      <${Held} view=${view} />
      <dl>
        <${Fact} name="History">${counted(view.tokens, "token")}<//>
        <${Fact} name="Place">${place(kv)}, ${counted(kv.blocks, "block")}<//>
        <${Fact} name="Residency">${view.residency}<//>
        <${Fact} name="Prompts">${counted(usage.prompt_tokens, "token")}, ${number(usage.cached_tokens)} cached<//>
        <${Fact} name="Generated">${counted(usage.completion_tokens, "token")}<//>
        <${Fact} name="Recomputed">${counted(usage.tokens_recomputed, "token")}<//>
        <${Fact} name="Left the device">${bytes(usage.bytes_out)}<//>
        <${Fact} name="Came back">${bytes(usage.bytes_in)} in ${counted(usage.restores, "restore")}<//>
        <${Fact} name="Last turn waited">${waits(usage.resume_ms)}<//>
        <${Fact} name="Opened">${ago(view.created_at)}<//>
        <${Fact} name="Closes by itself">${closes(view.expires_at)}<//>
        ${view.tenant !== null && html`<${Fact} name="Tenant">${view.tenant}<//>`}
        ${Object.entries(view.metadata).map(([name, value]) => html`<${Fact} key=${name} name=${name}>${value}<//>`)}
        <${Fact} name="Id"><code>${view.id}</code><//>
      </dl>
    </section>
  `;
}

const Fact = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

/** KV by place, with a bar of its share. */
function Held({ view }) {
  const most = bytesOf(view) || 1;
  return html`<ul class="held" aria-label="KV by place">${TIERS.map((tier) => {
    const held = bytesIn(view, tier);
    return html`<li key=${tier}><span>${tier}</span>
      <span class="bar" aria-hidden="true"><span class=${`tier-${tier}`} style=${{ width: `${(100 * held) / most}%` }} /></span>
      <span class="number">${bytes(held)}</span></li>`;
  })}</ul>`;
}

const closes = (time) => (time === null ? "not during a turn" : `in ${seconds(Math.max(0, time - second.value))} without a turn`);

/** The tree of forks that a session belongs to. */
function Forks({ view }) {
  const tree = treeOf(view.id, ids.value);
  return html`
    <section class="panel forks stack" aria-labelledby="forks">
      <h2 id="forks">Forks</h2>
      ${tree.size === 1 && html`<p class="dim">None: Fork opens a session that shares this one's history and KV.</p>`}
      <ul class="tree"><${Branch} node=${tree.root} here=${view.id} isRoot /></ul>
    </section>
  `;
}

/** Where it was forked. Its origin stands above it, unless that is closed. */
const origin = ({ forked_from: from }, isRoot) =>
  from && ` · ${isRoot ? `fork of ${shortId(from.session_id)}, which is closed,` : "forked"} at ${number(from.tokens)}`;

function Branch({ node: { id, children }, here, isRoot }) {
  const view = sessionOf(id).value;
  return view && html`<li>
    <span class="node row">
      <a href=${linkTo(view.id)} aria-current=${view.id === here ? "true" : null}><${Named} view=${view} /></a>
      <span class=${`chip state-${view.state}`}>${turnWord(view)}</span>
      <span class="dim number">${counted(view.tokens, "token")}${origin(view, isRoot)}</span>
    </span>
    ${children.length > 0 && html`<ul>${children.map((child) => html`<${Branch} key=${child.id} node=${child} here=${here} />`)}</ul>`}
  </li>`;
}

/** `{root, size}` of the tree around a session among all of `ids`. A node is `{id, children}`. A session whose origin is
 * gone is a root. An origin never changes, so other news of the sessions are not looked at. */
function treeOf(id, ids) {
  const nodes = new Map(ids.map((each) => [each, { id: each, children: [] }]));
  const originOf = (node) => nodes.get(sessionOf(node.id).peek()?.forked_from?.session_id);
  for (const node of nodes.values()) originOf(node)?.children.push(node);
  let root = nodes.get(id);
  while (originOf(root)) root = originOf(root);
  return { root, size: sizeOf(root) };
}

const sizeOf = (node) => 1 + node.children.reduce((sum, child) => sum + sizeOf(child), 0);
