// Which sessions come from which: the tree that one of them belongs to.

/** `{root, size}` of the tree around `view` among `views`. A node is `{view, children}`. A session whose origin is gone
 * is a root. */
export function treeOf(view, views) {
  const nodes = new Map(views.map((each) => [each.id, { view: each, children: [] }]));
  for (const node of nodes.values()) nodes.get(originOf(node.view))?.children.push(node);
  let root = nodes.get(view.id) ?? { view, children: [] };
  while (nodes.has(originOf(root.view))) root = nodes.get(originOf(root.view));
  return { root, size: sizeOf(root) };
}

const originOf = (view) => view.forked_from?.session_id;

const sizeOf = (node) => 1 + node.children.reduce((sum, child) => sum + sizeOf(child), 0);
