// When a parked session will go on.
import { html } from "../lib/html.js";

export function ReturnTime({ value, error }) {
  const wrong = error?.param === "resume_in_ms";
  return html`
    <label class="return">back in <input value=${value.value} size="5" inputmode="decimal" autocomplete="off" placeholder="—"
      aria-invalid=${wrong ? "true" : null} aria-describedby=${wrong ? "wrong-return" : null}
      onInput=${(event) => (value.value = event.target.value)} /> s</label>
    ${wrong && html`<span class="wrong" id="wrong-return" role="alert">${error.message}</span>`}
  `;
}
