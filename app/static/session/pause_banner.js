// Says that a session is paused, where, and what ends it.
import { number, seconds } from "../lib/format.js";
import { html } from "../lib/html.js";
import { server } from "../state/connection.js";
import { memory } from "../state/memory.js";
import { linkTo } from "../state/route.js";

export function PauseBanner({ view }) {
  void memory.value; // once a second: time goes on
  const { layer, first, end, expires_at } = view.checkpoint;
  const layers = server.value?.num_layers;
  const left = expires_at === null ? null : Math.max(0, expires_at - Date.now() / 1000);
  return html`
    <section class="paused panel" aria-label="Paused">
      <p><strong>Paused after layer ${layer}${layers && ` of ${layers - 1}`}</strong>, ${
        end - first === 1 ? `at position ${number(first)}` : `at positions ${number(first)} to ${number(end - 1)}`
      } (${view.checkpoint.pass}). ${left !== null && html`<span class="number">The pause ends by itself in ${seconds(left)}.</span>`}</p>
      <a href=${linkTo(view.id, "model")}>Look inside the model</a>
    </section>
  `;
}
