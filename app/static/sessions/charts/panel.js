// A chart with its title and the figures of its lines.
import { html } from "../../lib/html.js";

/** `lines` are `{token, name, text, about}`: the colour of each line, and what it stands at. */
export const ChartPanel = ({ title, unit, lines, children }) => html`<figure class="chart-panel">
  <figcaption>
    <h3>${title} <span class="dim">${unit}</span></h3>
    <span class="lines">
      ${lines.map(
        ({ token, name, text, about }) => html`<span key=${name} title=${about}><i class="line ${token.slice(2)}"></i>${name} <b>${text}</b></span>`,
      )}
    </span>
  </figcaption>
  ${children}
</figure>`;
