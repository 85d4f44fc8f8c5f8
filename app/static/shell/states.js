// What stands in a place that has nothing to show: empty, loading, or in error; and what a button does that may fail.
import { useSignal } from "@preact/signals";
import { html } from "../lib/html.js";
import { isPast } from "../state/connection.js";

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
    try {
      const value = await run();
      state.value = { busy: false, error: null };
      return { done: true, value };
    } catch (error) {
      state.value = { busy: false, error: error.name === "AbortError" ? null : error };
      return { done: false };
    }
  };
  return { ...state.value, act };
}
