// Where a turn is written and sent, with how it chooses its tokens, and where it is cancelled or resumed.
import { html } from "../lib/html.js";
import { Button, errorElse, Failure, Field, isAbout, told, useAction, Wrong } from "../shell/controls.js";
import { cancel, generate, resume, turnOf, whyNoTurn } from "../state/turns.js";
import { bodyOf, draftOf, FIELDS } from "./draft.js";

const KINDS = [["prompt", "Prompt"], ["message", "Chat message"], ["nothing", "Go on"]];
const ROLES = ["user", "system", "assistant", "tool"];
const INPUTS = ["prompt", "messages", "token_ids"];
/** The fields that tell what is wrong with them. */
const SHOWN = [...INPUTS, ...FIELDS.map((each) => each.name), "stop", "other"];

const MAIN = FIELDS.filter((each) => each.main);
const REST = FIELDS.filter((each) => !each.main);

/** Without a `title` it is a part of another panel. `buttons` are what stands below the fields. */
export function Composer({ view, title = "Generate", buttons: Buttons = Controls }) {
  const draft = draftOf(view.id);
  const turn = turnOf(view.id);
  const change = (changed) => (draft.value = { ...draft.value, ...changed });
  const send = (event) => {
    event.preventDefault();
    if (view.state === "idle" && !turn.value.running) sendDraft(view.id, draft, turn);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  };
  const { error } = turn.value;
  return html`
    <form class=${title ? "panel composer stack" : "composer stack"} aria-label=${title ?? "A turn"} noValidate
      onSubmit=${send} onKeyDown=${onKeyDown}>
      ${title && html`<h2>${title}</h2>`}
      <${Input} draft=${draft.value} change=${change} error=${error} />
      <${Settings} draft=${draft.value} change=${change} error=${error} />
      <${Buttons} view=${view} running=${turn.value.running} />
      <${Failure} error=${errorElse(error, SHOWN)} />
    </form>
  `;
}

function sendDraft(id, draft, turn) {
  const sent = draft.value;
  let body;
  try {
    body = bodyOf(sent);
  } catch (error) {
    turn.value = { ...turn.value, error };
    return;
  }
  const { kind, role, text } = sent;
  const tell = (isThere) => {
    if (draft.value.text !== (isThere ? text : "")) return false;
    draft.value = { ...draft.value, ...(isThere ? { text: "" } : { kind, role, text }) };
    return true;
  };
  generate(id, body, ...(kind === "nothing" ? [] : [text, tell]));
}

function Input({ draft, change, error }) {
  const wrong = INPUTS.some((name) => isAbout(error, name)) ? error.message : null;
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
      rows="4" aria-label="Text" name=${draft.kind === "message" ? "messages" : "prompt"} disabled=${draft.kind === "nothing"} value=${draft.kind === "nothing" ? "" : draft.text}
      placeholder=${draft.kind === "nothing" ? "The model goes on from the history as it is" : "What comes next. Ctrl+Enter sends"}
      ...${told("text", wrong)}
      onInput=${(event) => change({ text: event.target.value })}
    />
    <${Wrong} id="text" error=${wrong} />
  `;
}

/** How the turn chooses its tokens and where it ends, with what is wrong below each field. */
function Settings({ draft, change, error }) {
  const field = ({ name, label, hint }) => html`<${Setting}
    key=${name} name=${name} label=${label} hint=${hint} value=${draft.values[name] ?? ""} error=${error}
    onInput=${(text) => change({ values: { ...draft.values, [name]: text } })}
  />`;
  const isBelow = Boolean(error && (draft.other || REST.some(({ name }) => isAbout(error, name))));
  return html`
    <div class="fields">
      ${MAIN.map(field)}
      <${Setting} rows="1" name="stop" label="Stop at" hint="one a line" value=${draft.stop} error=${error}
        onInput=${(stop) => change({ stop })} />
    </div>
    <details open=${draft.more || isBelow} onToggle=${({ target }) => change({ more: target.open })}>
      <summary>More</summary>
      <div class="fields">
        ${REST.map(field)}
        <${Setting} rows="1" name="other" label="Other fields, as JSON" hint=${'{"top_k": 40}'} value=${draft.other} error=${error}
          onInput=${(other) => change({ other })} />
        <label class="check"><input type="checkbox" checked=${draft.ignoreEos}
          onChange=${(event) => change({ ignoreEos: event.target.checked })} />Ignore the end token</label>
      </div>
    </details>
  `;
}

/** `error` is an `ApiError` or null; it is shown if it names this field. `rows` makes it a field of so many lines. */
const Setting = ({ name, label, hint, value, onInput, error, rows }) => html`
  <${Field} id="field-${name}" name=${name} label=${label} error=${isAbout(error, name) ? error.message : null}
    control=${(tied) => {
      const props = { ...tied, value, placeholder: hint, autocomplete: "off", onInput: (event) => onInput(event.target.value) };
      return rows ? html`<textarea rows=${rows} ...${props} />` : html`<input inputmode="decimal" ...${props} />`;
    }} />
`;

function Controls({ view, running }) {
  const { error, act } = useAction();
  const busy = running || view.state === "running" || view.state === "queued";
  const paused = view.state === "paused" && !running;
  const unpaused = paused ? whyNoTurn.value : "The session is not paused";
  const why = busy ? "A turn is running" : paused ? "The turn is paused: resume or cancel it first" : null;
  return html`
    <div class="row">
      <${Button} type="submit" class="primary" why=${why ?? whyNoTurn.value} title="Ctrl+Enter">Send<//>
      <${Button} why=${unpaused} onClick=${() => resume(view.id)}>Resume to the next breakpoint<//>
      <${Button} why=${unpaused} onClick=${() => resume(view.id, "end")}>Resume to the end<//>
      <${Button} class="danger" why=${why === null ? "No turn is running" : null}
        onClick=${() => act(() => cancel(view.id))}>Cancel the turn<//>
      <span class="dim">${why ?? whyNoTurn.value}</span>
    </div>
    <${Failure} error=${error} />
  `;
}
