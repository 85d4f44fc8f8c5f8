// Asks for the key of a server that wants one.
import { html } from "../lib/html.js";
import { connection } from "../state/connection.js";
import { key } from "../state/key.js";

export function KeyForm() {
  const use = (event) => {
    event.preventDefault();
    key.value = new FormData(event.target).get("key").trim();
  };
  return html`
    <section class="empty">
      <h1>A key, please</h1>
      <p id="why" role=${key.value ? "alert" : null}>${connection.value.message}</p>
      <form class="row" onSubmit=${use}>
        <label>API key <input name="key" type="password" autocomplete="off" required aria-describedby="why" /></label>
        <button class="primary">Use this key</button>
      </form>
      <p>The page keeps it in memory only: not in the address, not in the browser's storage.</p>
    </section>
  `;
}
