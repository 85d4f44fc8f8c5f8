// Preact's elements, written as templates.
import { h, options } from "preact";
import htm from "htm";

export const html = htm.bind(h);

/** Text without marks that turn the direction of what follows. */
export const harmless = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

const SAID = ["title", "aria-label"];
const { vnode: next } = options;
options.vnode = (vnode) => {
  const { type, props } = vnode;
  if (typeof props === "string") vnode.props = harmless(props);
  else if (typeof type === "string") for (const name of SAID) if (typeof props[name] === "string") props[name] = harmless(props[name]);
  next?.(vnode);
};
