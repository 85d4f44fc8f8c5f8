// Where a turn is written and sent, and where it is cancelled or resumed.
import { html } from "../lib/html.js";
import { Failure } from "../shell/states.js";
import { useAction } from "../shell/use_action.js";
import { bodyOf, draftOf, FIELDS } from "./draft.js";
import { isWrong, Settings } from "./settings.js";
import { cancel, generate, resume, turnOf } from "./turn.js";

const KINDS = [["prompt", "Prompt"], ["message", "Chat message"], ["nothing", "Go on"]];
const ROLES = ["user", "system", "assistant", "tool"];
const INPUTS = ["prompt", "messages", "token_ids"];

export function Composer({ view }) {
  const draft = draftOf(view.id);
  const turn = turnOf(view.id);
  const change = (changed) => (draft.value = { ...draft.value, ...changed });
  const send = async (event) => {
    event?.preventDefault();
    if (view.state !== "idle" || turn.value.running) return;
    await sendDraft(view.id, draft, turn);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  };
  const { error } = turn.value;
  return html`
    <form class="panel composer stack" aria-labelledby="composer" noValidate onSubmit=${send} onKeyDown=${onKeyDown}>
      <h2 id="composer">Generate</h2>
      <${Input} draft=${draft.value} change=${change} error=${error} />
      <${Settings} draft=${draft.value} change=${change} error=${error} />
      <${Controls} view=${view} running=${turn.value.running} />
      <${Rest} error=${error} />
    </form>
  `;
}

async function sendDraft(id, draft, turn) {
  const sent = draft.value;
  let body;
  try {
    body = bodyOf(sent);
  } catch (error) {
    turn.value = { ...turn.value, error };
    return;
  }
  const text = sent.kind === "nothing" ? "" : sent.text;
  const well = await generate(id, body, text);
  if (well && draft.value.text === sent.text) draft.value = { ...draft.value, text: "" };
}

function Input({ draft, change, error }) {
  const wrong = INPUTS.some((name) => isWrong(error, name));
  return html`
    <div class="row">
      <fieldset class="choice" aria-label="What the turn adds">
        ${KINDS.map(
          ([kind, label]) => html`<label>
            <input type="radio" name="kind" checked=${draft.kind === kind} onChange=${() => change({ kind })} />${label}
          </label>`,
        )}
      </fieldset>
      ${draft.kind === "message" &&
      html`<label>Role <select value=${draft.role} onChange=${(event) => change({ role: event.target.value })}>
        ${ROLES.map((role) => html`<option>${role}</option>`)}
      </select></label>`}
    </div>
    <textarea
      rows="4" aria-label="Text" disabled=${draft.kind === "nothing"} value=${draft.kind === "nothing" ? "" : draft.text}
      placeholder=${draft.kind === "nothing" ? "The model goes on from the history as it is" : "What comes next. Ctrl+Enter sends"}
      aria-invalid=${wrong ? "true" : null} aria-describedby=${wrong ? "wrong-text" : null}
      onInput=${(event) => change({ text: event.target.value })}
    />
    ${wrong && html`<span class="wrong" id="wrong-text" role="alert">${error.message}</span>`}
  `;
}

/** An error that names no field that is shown. */
function Rest({ error }) {
  if (error === null) return null;
  const shown = [...INPUTS, ...FIELDS.map((each) => each.name), "stop", "other"].some((name) => isWrong(error, name));
  return shown ? null : html`<${Failure} error=${error} />`;
}

function Controls({ view, running }) {
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
