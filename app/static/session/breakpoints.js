// The breakpoints of a session: which are armed, and a button to remove each.
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call } from "../lib/api.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { Failure, Loading, useAction } from "../shell/states.js";
import { happeningsOf, isSeen, lastOf } from "../state/happenings.js";
import { linkTo } from "../state/route.js";

export function Breakpoints({ view }) {
  const { busy, error, act } = useAction();
  const why = busy ? "One moment" : null;
  const armed = useSignal(null);
  const path = `/v1/sessions/${view.id}/breakpoints`;
  const load = () => act(async () => (armed.value = (await call("GET", path)).data));
  const removed = (address) => act(async () => {
    await call("DELETE", address);
    armed.value = (await call("GET", path)).data;
  });
  const happened = lastOf(happeningsOf(view.id).value, (each) => each.name !== "session" || isSeen(each));
  useEffect(() => void load(), [happened]); // one that acts once goes when it has
  return html`
    <section class="panel stack" aria-labelledby="breakpoints">
      <div class="row">
        <h2 id="breakpoints">Breakpoints</h2>
        <a href=${linkTo(view.id, "model")}>Arm one inside the model</a>
      </div>
      <${Failure} error=${error} retry=${load} />
      ${armed.value === null && !error && html`<${Loading} what="breakpoints" />`}
      ${armed.value?.length === 0 && html`<p class="dim">None is armed: turns run through.</p>`}
      ${armed.value?.length > 0 && html`
        <ul class="armed">${armed.value.map((each) => html`<li key=${each.id}>
          <span>${said(each)}</span>
          <${Button} why=${why} aria-label=${`Remove ${said(each)}`} onClick=${() => removed(`${path}/${each.id}`)}>Remove<//>
        </li>`)}</ul>
        ${armed.value.length > 1 && html`<${Button} why=${why} onClick=${() => removed(path)}>Remove all<//>`}
      `}
    </section>
  `;
}

/** A breakpoint in words. */
function said({ action, layers, when, edits, once }) {
  const words = [`${action} after layer${layers.length > 1 ? "s" : ""} ${layers.join(", ")}`];
  if (when.pass !== "any") words.push(`in ${when.pass}`);
  if (when.position !== null) words.push(`at position ${when.position}`);
  if (when.token_id !== null) words.push(`at token ${when.token_id}`);
  if (when.every !== null) words.push(`every ${when.every} positions`);
  if (edits.length) words.push(`(${edits.map(({ op, factor }) => (factor === null ? op : `${op} ${factor}`)).join(", ")})`);
  if (once) words.push("once");
  return words.join(" ");
}
