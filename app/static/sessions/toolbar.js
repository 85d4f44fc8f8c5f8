// What is above the board: how many sessions there are, how to get one, and the filters.
import { counted, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { ids } from "../state/sessions.js";
import { chosen, clear, counts, FACETS, isFiltered, listed, order, text, toggle } from "./listing.js";
import { creating } from "./open/create.js";
import { ImportButton } from "./open/import.js";

export const Toolbar = () => html`
  <div class="row heading">
    <h1>Sessions</h1>
    <p class="dim" role="status"><${Shown} /></p>
    <div class="row ends">
      <${ImportButton} />
      <${Button} class="primary" onClick=${() => (creating.value = true)}>New session<//>
    </div>
  </div>
  <div class="filters" role="group" aria-label="Filters">
    <input
      type="search" id="search" placeholder="Find an id or a tag" aria-label="Find an id or a tag" value=${text.value}
      onInput=${(event) => (text.value = event.target.value)}
    />
    ${FACETS.map((facet) => html`<${Facet} key=${facet.key} facet=${facet} />`)}
    <button class="quiet" disabled=${!isFiltered()} onClick=${clear}>Clear the filters</button>
    <${BiggestFirst} />
  </div>
`;

function Shown() {
  const total = ids.value.length;
  return isFiltered() ? `${number(listed.value.length)} of ${counted(total, "session")}` : counted(total, "session");
}

const Facet = ({ facet: { key, title, values } }) => html`<fieldset class="facet">
  <legend>${title}</legend>
  ${values.map(
    (value) => html`<button key=${value} aria-pressed=${chosen.value[key].includes(value)} onClick=${() => toggle(key, value)}>
      ${value} <span class="count">${number(counts.value[key]?.[value] ?? 0)}</span>
    </button>`,
  )}
</fieldset>`;

function BiggestFirst() {
  const isOn = order.value.by === "bytes" && order.value.down;
  return html`<button class="biggest" aria-pressed=${isOn} onClick=${sortBiggestFirst}>Biggest first</button>`;
}

/** The answer is in the first row, so it comes into view. */
function sortBiggestFirst() {
  order.value = { by: "bytes", down: true };
  const table = document.querySelector(".table-frame");
  table.scrollTop = 0;
  table.scrollIntoView({ block: "nearest" });
}
