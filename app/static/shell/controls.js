// Buttons that say why they do nothing now, fields that say what is wrong with their values, and what stands in a place
// that has nothing to show: empty, loading, or in error.
import { useEffect, useRef } from "preact/hooks";
import { signal, useSignal } from "@preact/signals";
import { nameOf, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { AWAY, isAway, isPast } from "../state/connection.js";
import { route } from "../state/route.js";

/** `why` is the reason for which it cannot be used now, or null; without the server none can. It keeps the focus then, so
 * that a keyboard does not lose its place while a turn runs. */
export function Button({ why = null, title = null, onClick, children, ...rest }) {
  why ??= isAway() ? AWAY : null;
  return html`
    <button
      type="button"
      ...${rest}
      title=${why ?? title}
      aria-disabled=${why ? "true" : null}
      onClick=${(event) => (why ? event.preventDefault() : onClick?.(event))}
    >
      ${children}
    </button>
  `;
}

/** What a session's client calls it, then the end of its id, which tells apart two of one name. The name is shortened first. */
export function Named({ view }) {
  const [name, id] = [nameOf(view), shortId(view.id)];
  if (name === id) return id;
  const called = name.endsWith(id) ? name.slice(0, -id.length).trim() : name;
  return html`<span class="called">${called}</span> <span class="mono dim short-id">${id}</span>`;
}

/** `control` is a function that gets what ties the control to its label and its error. `error` is a text, or null. */
export function Field({ id, label, name = id, error, wide, children, control }) {
  return html`
    <div class=${wide ? "field wide" : "field"}>
      <label for=${id}>${label}</label>
      ${control({ id, name, ...told(id, error) })} ${children}
      <${Wrong} id=${id} error=${error} />
    </div>
  `;
}

/** What ties a control to the error that `Wrong` shows. */
export const told = (id, error) => (error ? { "aria-invalid": "true", "aria-describedby": `${id}-error` } : {});

export const Wrong = ({ id, error }) => error && html`<p class="wrong" id=${`${id}-error`} role="alert">${error}</p>`;

/** When each field was last edited, by its session and its name. */
const edited = new Map();
const editOf = (name) => edited.get(route.peek().id + name);
addEventListener("input", ({ target }) => edited.set(route.peek().id + target.name, performance.now()), true);

/** A field is one part of the API's name for it, as in `stop.0` or `edits.0.factor`. Before a "-" there is its form. */
const names = (error, name) => error?.param?.split(".").includes(name.split("-").pop());

/** Whether an error is about a field as it is: one that was edited since it was sent may be right by now. */
export const isAbout = (error, name) => Boolean(names(error, name) && !(editOf(name) > error.asked));

/** What an error says of a field, without the field's name; null if it is about another. */
export const errorOf = (error, name) => (isAbout(error, name) ? error.message.replace(/^[\w.]+: /, "") : null);

/** An error that is about none of these fields, or about what one held before the answer came; else null. */
export const errorElse = (error, fields) =>
  fields.some((name) => names(error, name) && !(editOf(name) > error.asked && editOf(name) < error.told)) ? null : error;

const PHONE = matchMedia("(max-width: 600px)");

/** Whether the window is as narrow as a phone. */
export const isPhone = signal(PHONE.matches);
PHONE.addEventListener("change", () => (isPhone.value = PHONE.matches));

/** Folded on a phone, and opened by one touch, or once it is to be `open`: nothing closes it over what is in use. */
export function Folded({ title, open, children }) {
  const box = useRef(null);
  useEffect(() => {
    if (open && box.current) box.current.open = true;
  }, [open, isPhone.value]);
  return isPhone.value ? html`<details ref=${box} class="folded"><summary>${title}</summary>${children}</details>` : children;
}

/** A title, and below it what to do. */
export const Empty = ({ title, children }) => html`
  <section class="empty"><h1>${title}</h1><p>${children}</p></section>
`;

/** Something is on its way. Its place is as large as what comes, so nothing moves: give it a class. */
export const Loading = ({ what, class: name = "" }) => html`<p class="loading ${name}" role="status">Loading ${what}</p>`;

/** An error where it happened, if there is one, with a way to try again. */
export const Failure = ({ error, retry }) =>
  error && !isPast(error) &&
  html`<p class="failure" role="alert">${error.message} ${retry && html`<button onClick=${retry}>Try again</button>`}</p>`;

/** `act(run)` runs `run()` and answers `{done, value}`; `busy` is true meanwhile, and `error` what it threw. One at a
 * time: what is asked for while it is busy is not done. */
export function useAction() {
  const state = useSignal({ busy: false, error: null });
  const act = async (run) => {
    if (state.peek().busy) return { done: false };
    state.value = { busy: true, error: null };
    const asked = performance.now();
    try {
      const value = await run();
      state.value = { busy: false, error: null };
      return { done: true, value };
    } catch (error) {
      state.value = { busy: false, error: error.name === "AbortError" ? null : Object.assign(error, { asked }) };
      return { done: false };
    }
  };
  return { ...state.value, act };
}
