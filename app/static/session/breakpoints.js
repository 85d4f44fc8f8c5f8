// The breakpoints of a session: which are armed, and a button to remove each.
import { useEffect, useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { disarm, refresh } from "../model/arming.js";
import { deskOf } from "../model/desk.js";
import { Button, Failure, Loading, useAction } from "../shell/controls.js";
import { happeningsOf, isSeen, lastOf } from "../state/happenings.js";
import { where } from "../state/points.js";
import { linkTo } from "../state/route.js";

export function Breakpoints({ view }) {
  const desk = deskOf(view.id);
  const armed = desk.breakpoints.value;
  const [error, tell] = useState(null);
  const load = () => refresh(desk).then(() => tell(null), tell);
  const happened = lastOf(happeningsOf(view.id).value, (each) => !["session", "edit"].includes(each.name) || isSeen(each));
  useEffect(() => void load(), [happened]); // one that acts once goes when it has
  return html`
    <section class="panel stack" aria-labelledby="breakpoints">
      <div class="row">
        <h2 id="breakpoints">Breakpoints</h2>
        <a href=${linkTo(view.id, "model")}>Arm one inside the model</a>
      </div>
      <${Failure} error=${error} retry=${load} />
      ${armed === null && !error && html`<${Loading} what="breakpoints" />`}
      ${armed?.length === 0 && html`<p class="dim">None is armed: turns run through.</p>`}
      <${Armed} desk=${desk} armed=${armed ?? []} />
    </section>
  `;
}

/** Some of the breakpoints, with buttons that remove them. */
export function Armed({ desk, armed }) {
  const { busy, error, act } = useAction();
  const button = (label, gone, name) => html`<${Button} why=${busy ? "One moment" : null} aria-label=${name}
    onClick=${() => act(() => disarm(desk, gone))}>${label}<//>`;
  return html`
    <${Failure} error=${error} />
    ${armed.length > 0 && html`<ul class="armed">${armed.map((each) => html`<li key=${each.id}>
      <span>${said(each)}</span>${button("Remove", [each], `Remove ${said(each)}`)}
    </li>`)}</ul>`}
    ${armed.length > 1 && button("Remove all", armed)}
  `;
}

/** An edit in words. */
function change({ op, factor, when, ...edit }) {
  const words = [op];
  if (factor !== null) words.push(factor);
  for (const part of ["heads", "neurons", "experts"]) if (edit[part]) words.push(`${part} ${edit[part].join(" ")}`);
  if (when) words.push("on a condition");
  return words.join(" ");
}

/** A breakpoint in words. */
function said({ action, point, layers, heads, when, edits, once }) {
  const words = [`${action} ${where(point, layers)}`];
  if (heads.length) words.push(`of heads ${heads.join(", ")}`);
  if (when.pass !== "any") words.push(`in ${when.pass}`);
  if (when.position !== null) words.push(`at position ${when.position}`);
  if (when.token_id !== null) words.push(`at token ${when.token_id}`);
  if (when.every !== null) words.push(`every ${when.every} positions`);
  if (edits.length) words.push(`(${edits.map(change).join(", ")})`);
  if (once) words.push("once");
  return words.join(" ");
}
