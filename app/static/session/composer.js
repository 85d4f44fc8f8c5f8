// Where a turn is written and sent, with how it chooses its tokens, and where it is cancelled or resumed.
import { ApiError } from "../lib/api.js";
import { html } from "../lib/html.js";
import { Button, errorElse, Failure, Field, Folded, isAbout, told, useAction, Wrong } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { perSession } from "../state/per_key.js";
import { cancel, generate, resume, turnOf, whyNoTurn } from "../state/turns.js";

/** What the fields of a turn are called, and what they say when they are empty. All are text until they are sent: the
 * server judges them. `main` ones are always shown. */
const FIELDS = [
  { name: "max_tokens", label: "Most tokens", hint: "room left", main: true },
  { name: "temperature", label: "Temperature", hint: "the model’s", main: true },
  { name: "seed", label: "Seed", hint: "drawn", main: true },
  { name: "top_p", label: "Top p", hint: "the model’s" },
  { name: "top_k", label: "Top k", hint: "the model’s" },
  { name: "min_p", label: "Min p", hint: "the model’s" },
  { name: "min_tokens", label: "Fewest tokens", hint: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "the model’s" },
  { name: "presence_penalty", label: "Presence penalty", hint: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", hint: "0" },
];

const FRESH = { kind: null, role: "user", text: "", values: { max_tokens: "128" }, stop: "", ignoreEos: false, chances: true, other: "", more: false };

/** The signal of a session's draft: what has been typed and not been sent yet. `kind` is `prompt`, `message`, `nothing` (go
 * on from the history as it is), or null: none has been chosen. */
const draftOf = perSession(FRESH);

const KINDS = [["prompt", "Prompt"], ["message", "Chat message"], ["nothing", "Go on"]];
const ROLES = ["user", "system", "assistant", "tool"];
const INPUTS = ["prompt", "messages", "token_ids"];
/** The fields that tell what is wrong with them. */
const SHOWN = [...INPUTS, ...FIELDS.map((each) => each.name), "stop", "other"];

const MAIN = FIELDS.filter((each) => each.main);
const REST = FIELDS.filter((each) => !each.main);

const CHECKS = [["ignoreEos", "Ignore the end token"], ["chances", "Show how probable tokens were"]];

/** Without a `title` it is a part of another panel. `buttons` are what stands below the fields. */
export function Composer({ view, title = "Generate", buttons: Buttons = Controls }) {
  const draft = draftOf(view.id);
  const turn = turnOf(view.id);
  const written = { ...draft.value, kind: draft.value.kind ?? (title && server.value?.chat ? "message" : "prompt") };
  const change = (changed) => (draft.value = { ...draft.value, ...changed });
  const send = (event) => {
    event.preventDefault();
    if (view.state === "idle" && !turn.value.running) sendDraft(view.id, written, draft, turn);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  };
  const { error } = turn.value;
  return html`
    <form class=${title ? "panel composer stack" : "composer stack"} aria-label=${title ?? "A turn"} noValidate
      onSubmit=${send} onKeyDown=${onKeyDown}>
      ${title && html`<h2>${title}</h2>`}
      <${Input} draft=${written} change=${change} error=${error} />
      <${Folded} title="How it chooses tokens" open=${Boolean(error)}><${Settings} draft=${written} change=${change} error=${error} /><//>
      <${Buttons} view=${view} running=${turn.value.running} />
      <${CopyAs} of=${view.checkpoint ? resuming(view.id) : { "the turn": () => [["POST", `/v1/sessions/${view.id}/generate`, { body: bodyOf(written) }]] }} />
      <${Failure} error=${errorElse(error, SHOWN)} />
    </form>
  `;
}

const resuming = (id) => Object.fromEntries([["the resume", {}], ["the resume to the end", { until: "end" }]].map(([what, body]) =>
  [what, () => [["POST", `/v1/sessions/${id}/resume`, { body }]]]));

function sendDraft(id, sent, draft, turn) {
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
        ${CHECKS.map(([name, label]) => html`<label class="check"><input type="checkbox" checked=${draft[name]}
          onChange=${(event) => change({ [name]: event.target.checked })} />${label}</label>`)}
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
  const unpaused = paused ? whyNoTurn.value : "No turn is paused";
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

/** The body of `generate`. Throws an `ApiError` that names the field where a text cannot be sent. */
function bodyOf(draft) {
  const body = { ...(draft.chances && (draft.values.max_tokens ?? "").trim() && { logprobs: 0 }), ...other(draft.other), ...input(draft) };
  for (const { name } of FIELDS) {
    const text = (draft.values[name] ?? "").trim();
    if (text) body[name] = number(name, text);
  }
  const stop = draft.stop.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) body.stop = stop;
  if (draft.ignoreEos) body.ignore_eos = true;
  return body;
}

function input({ kind, role, text }) {
  if (kind === "message") return { messages: [{ role, content: text }] };
  if (kind === "nothing") return { token_ids: [] };
  if (text) return { prompt: text };
  throw refusal("prompt", "prompt: write what comes next, or choose “Go on”");
}

/** A text that is no number goes as it is: the server says which are allowed. */
function number(name, text) {
  const value = Number(text);
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw refusal(name, `${name}: this page sends integers up to ${Number.MAX_SAFE_INTEGER}; got ${text}`);
  }
  return Number.isFinite(value) ? value : text;
}

function other(text) {
  if (!text.trim()) return {};
  try {
    const fields = JSON.parse(text);
    if (fields !== null && typeof fields === "object" && !Array.isArray(fields)) return fields;
  } catch {
    // told below
  }
  throw refusal("other", 'other fields: a JSON object, such as {"structured_outputs": {"regex": "[0-9]+"}}');
}

const refusal = (param, message) => new ApiError(0, { message, param });
