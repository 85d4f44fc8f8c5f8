// Buttons that copy what an action does as code.
import { curlOf } from "../lib/code.js";
import { html } from "../lib/html.js";
import { key } from "../state/connection.js";
import { attempt, say } from "../state/notices.js";

/** `python` and `calls` are functions, asked at the click: the text, and the calls of `curlOf`. Either may throw what is wrong
 * with the form. `what` names the action. */
export const CopyAs = ({ what, python, calls }) => html`
  <span class="copies" role="group" aria-label="Code: ${what}">
    <${Copy} name="Python" what=${what} text=${python} /><${Copy} name="curl" what=${what} text=${() => curlOf(calls(), Boolean(key.peek()))} />
  </span>
`;

function Copy({ name, what, text }) {
  const copy = () => attempt(`Copy as ${name}`, async () => {
    await put(text());
    say(`Copied as ${name}: ${what}`);
  });
  return html`<button type="button" class="quiet" title="Copy as ${name}: ${what}" onClick=${copy}>Copy as ${name}</button>`;
}

/** A browser has a clipboard only for pages of this machine and of https. Elsewhere it copies what is selected. */
async function put(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = Object.assign(document.createElement("textarea"), { value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser gives this page no clipboard");
  return undefined;
}
