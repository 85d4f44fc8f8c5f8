// The tree of forks that a session belongs to.
import { counted, number, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { linkTo } from "../state/route.js";
import { all } from "../state/sessions.js";
import { treeOf } from "./fork_tree.js";

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
