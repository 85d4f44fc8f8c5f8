// What stands in a place that has nothing to show: empty, loading, or in error.
import { html } from "../lib/html.js";

/** A title, and below it what to do. */
export const Empty = ({ title, children }) => html`
  <section class="empty"><h1>${title}</h1><p>${children}</p></section>
`;

/** Something is on its way. Its place is as large as what comes, so nothing moves: give it a class. */
export const Loading = ({ what, class: name = "" }) => html`<p class="loading ${name}" role="status">Loading ${what}</p>`;

/** An error where it happened, with a way to try again. */
export const Failure = ({ error, retry }) => html`
  <p class="failure" role="alert">${error.message} ${retry && html`<button onClick=${retry}>Try again</button>`}</p>
`;
