// The tree of forks that a session belongs to.
import { counted, number, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { linkTo } from "../state/route.js";
import { all } from "../state/sessions.js";

export function Forks({ view }) {
  const tree = treeOf(view, all());
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

const Branch = ({ node: { view, children }, here, isRoot = false }) => html`
  <li>
    <span class="node">
      <a href=${linkTo(view.id)} aria-current=${view.id === here ? "true" : null}>${shortId(view.id)}</a>
      <span class=${`chip state-${view.state}`}>${view.state}</span>
      <span class="dim number">${counted(view.tokens, "token")}${origin(view, isRoot)}</span>
    </span>
    ${children.length > 0 && html`<ul>${children.map((child) => html`<${Branch} key=${child.view.id} node=${child} here=${here} />`)}</ul>`}
  </li>
`;

/** `{root, size}` of the tree around `view` among `views`. A node is `{view, children}`. A session whose origin is gone
 * is a root. */
function treeOf(view, views) {
  const nodes = new Map(views.map((each) => [each.id, { view: each, children: [] }]));
  for (const node of nodes.values()) nodes.get(originOf(node.view))?.children.push(node);
  let root = nodes.get(view.id) ?? { view, children: [] };
  while (nodes.has(originOf(root.view))) root = nodes.get(originOf(root.view));
  return { root, size: sizeOf(root) };
}

const originOf = (view) => view.forked_from?.session_id;

const sizeOf = (node) => 1 + node.children.reduce((sum, child) => sum + sizeOf(child), 0);
