// What the model would say at the pause, before and after an edit.
import { html } from "../lib/html.js";
import { percent } from "../lib/format.js";
import { visible } from "../lib/tokens.js";

export function EditPreview({ preview }) {
  if (!preview) return html`<p class="dim empty-preview">A preview shows the lens before and after the edit.</p>`;
  const { position, before, after } = preview;
  return html`
    <div class="sides" role="status">
      <${Tops} title="Before, position ${position}" top=${before.top} />
      <${Tops} title="After, position ${position}" top=${after.top} beside=${before.top} />
    </div>
    <p class="dim">The turn goes on with the edit, unless it is undone.</p>
  `;
}

function Tops({ title, top, beside = null }) {
  return html`<table class="tops-table">
    <caption>${title}</caption>
    <tbody>${top.map((token) => html`<tr key=${token.token_id}>
      <td><code>${visible(token.text)}</code></td>
      <td class="number">${shareOf(token)}</td>
      ${beside && html`<td class="number dim">${changeOf(token, beside)}</td>`}
    </tr>`)}</tbody>
  </table>`;
}

const probability = (token) => Math.exp(token.logprob);
const shareOf = (token) => (token.logprob === null ? "not finite" : percent(probability(token)));

/** The change in points of a per cent; "new" where the token was not among the best. */
function changeOf(token, beside) {
  const before = beside.find((each) => each.token_id === token.token_id);
  if (!before || before.logprob === null || token.logprob === null) return "new";
  const points = 100 * (probability(token) - probability(before));
  return `${points < 0 ? "−" : "+"}${Math.abs(points).toFixed(1)}`;
}
