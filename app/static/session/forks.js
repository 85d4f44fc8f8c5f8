// The tree of forks that a session belongs to.
import { counted, number, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Named } from "../shell/controls.js";
import { linkTo } from "../state/route.js";
import { ids, sessionOf, stateWord } from "../state/sessions.js";

export function Forks({ view }) {
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
      <span class=${`chip state-${view.state}`}>${stateWord(view)}</span>
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
