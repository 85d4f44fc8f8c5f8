// The layers of the model, from the first to the last: where the turn stands, and which layers have breakpoints.
import { useRef, useState } from "preact/hooks";
import { html } from "../lib/html.js";
import { visible } from "../lib/tokens.js";
import { server } from "../state/connection.js";
import { complain } from "../state/notices.js";
import { where } from "../state/points.js";
import { marksOf, togglePause } from "./arming.js";
import { leadOf } from "./lens_map.js";

const MOVES = { ArrowUp: -1, ArrowDown: 1, PageUp: -8, PageDown: 8, Home: -Infinity, End: Infinity };

export function Ladder({ desk }) {
  const list = useRef(null);
  const count = server.value.num_layers;
  const standing = desk.session.value.checkpoint?.layer ?? null;
  void desk.lens.version.value;
  const lead = desk.cell.value && leadOf(desk.lens.column(desk.cell.value.position));
  const [current, setCurrent] = useState(standing ?? 0);
  const move = (event) => {
    const by = MOVES[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(count - 1, Math.max(0, current + by));
    setCurrent(next);
    list.current.children[next].firstElementChild.focus({ preventScroll: next === current });
  };
  const arm = (layer) => {
    setCurrent(layer);
    togglePause(desk, layer, desk.how.peek(), count).catch((error) => complain(`Layer ${layer}`, error));
  };
  return html`
    <div class="ladder">
      <div class="corner dim" aria-hidden="true">layer</div>
      <ol ref=${list} aria-label="Layers: choose one to pause after it" onKeyDown=${move}>
        ${Array.from({ length: count }, (_, layer) => html`<${Rung} key=${layer} layer=${layer} standing=${standing}
          marks=${marksOf(desk.breakpoints.value, layer)} how=${desk.how.value} tab=${layer === current} leads=${lead?.layer === layer ? lead.token.text : null} arm=${arm} />`)}
      </ol>
    </div>
  `;
}

/** `leads` is the text of the token that takes the lead here, in the column that is looked at, or null. */
function Rung({ layer, standing, marks, how, tab, leads, arm }) {
  const { pauses, captures, edits } = marks;
  const place = standing === null ? "" : layer === standing ? "here" : layer < standing ? "passed" : "";
  return html`<li class=${leads === null ? place : `${place} leads`}>
    <button tabindex=${tab ? 0 : -1} aria-pressed=${pauses.length > 0}
      aria-label=${spoken(layer, marks, place)}
      title=${pauses.length ? `Remove the pause ${where(pauses[0].point, [layer])}` : `Pause ${where(how.point, [layer])}`}
      onClick=${() => arm(layer)}>
      <i class="mark pause ${pauses.length ? "" : "off"} ${pauses.every((each) => each.once) ? "" : "each"}"></i>
      <span class="number">${layer}</span>
      <i class="mark capture ${captures.length ? "" : "off"}"></i>
      <i class="mark edit ${edits.length ? "" : "off"}"></i>
      <span class="stands">${place === "here" ? "paused" : leads !== null && visible(leads)}</span>
    </button>
  </li>`;
}

function spoken(layer, { pauses, captures, edits }, place) {
  const said = [`Layer ${layer}`];
  for (const { once, when } of pauses) said.push(`pauses ${once ? "once" : "each time"} in ${when.pass} pass`);
  if (captures.length) said.push("captures");
  if (edits.length) said.push("edits");
  if (place === "here") said.push("the turn stands here");
  return said.join(", ");
}
