// The buttons of a turn: send, resume, cancel.
import { html } from "../lib/html.js";
import { Failure } from "../shell/states.js";
import { useAction } from "../shell/use_action.js";
import { cancel, resume } from "./turn.js";

export function Controls({ view, running }) {
  const { error, act } = useAction();
  const busy = running || view.state === "running" || view.state === "queued";
  const paused = view.state === "paused" && !running;
  const why = busy ? "A turn is running" : paused ? "The turn is paused: resume or cancel it first" : null;
  return html`
    <div class="row">
      <button class="primary" disabled=${why !== null} title=${why ?? "Ctrl+Enter"}>Send</button>
      <button type="button" disabled=${!paused} title=${paused ? null : "The session is not paused"}
        onClick=${() => resume(view.id, null)}>Resume to the next breakpoint</button>
      <button type="button" disabled=${!paused} title=${paused ? null : "The session is not paused"}
        onClick=${() => resume(view.id, "end")}>Resume to the end</button>
      <button type="button" class="danger" disabled=${!busy && !paused} title=${busy || paused ? null : "No turn is running"}
        onClick=${() => act(() => cancel(view.id))}>Cancel the turn</button>
      <span class="dim">${why}</span>
    </div>
    ${error && html`<${Failure} error=${error} />`}
  `;
}
