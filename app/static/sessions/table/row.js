// One session as a row: the columns, what stands in them, and what can be done to it.
import { computed } from "@preact/signals";
import { call } from "../../lib/api.js";
import { now } from "../../lib/clock.js";
import { bytes, coarse, milliseconds, nameOf, number, waits } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { CloseButton, closing } from "../../shell/close.js";
import { Button, Named } from "../../shell/controls.js";
import { Icon } from "../../shell/icons.js";
import { isPast } from "../../state/connection.js";
import { perSession } from "../../state/per_key.js";
import { go, linkTo } from "../../state/route.js";
import { sessionOf, stateWord } from "../../state/sessions.js";
import { isPhone } from "../../state/window.js";
import { grouping } from "../listing.js";
import { bytesIn, leftOf, lookOf, tagsOf, tierName, TIERS } from "../looks.js";

const size = (count) => (count === 0 ? html`<span class="dim">${bytes(0)}</span>` : bytes(count));

/** `by` is what a column is sorted by; `width` is in pixels. A phone has room for some; what can be done there is on a session's screen. */
const COLUMNS = [
  { title: "Session", by: "name", width: 192, onPhone: 132, cell: (view) => html`<${Name} view=${view} />` },
  { title: "Tags", width: 110, cell: (view) => html`<${Tags} view=${view} />` },
  { title: "State", by: "state", width: 126, onPhone: 122, cell: (view) => html`<${State} view=${view} />` },
  { title: "Tokens", by: "tokens", width: 70, onPhone: 56, isNumber: true, cell: (view) => number(view.tokens) },
  ...TIERS.map((by) => ({ title: tierName[by], by, width: 68, isNumber: true, cell: (view) => size(bytesIn(view, by)) })),
  { title: "Queue, restore, prefill", about: "what the last turn's first token waited for", by: "resume", width: 172, isNumber: true, cell: (view) => html`<${Resume} ...${view.usage.resume_ms} />` },
  { title: "Created", by: "created", width: 88, isNumber: true, cell: (view) => `${coarse(now.value - view.created_at)} ago` },
  { title: "Returns", about: "when the client has said that it comes back", by: "returns", width: 88, isNumber: true, onPhone: 88, cell: (view) => html`<${Returns} view=${view} />` },
];

const Name = ({ view }) => html`<a class="name" href=${linkTo(view.id)} title=${view.id}><${Named} view=${view} /></a>`;

/** The phase tells more than the state, unless a turn is under way. */
const State = ({ view }) => html`<b class="swatch ${lookOf(view).key}" aria-hidden="true"><${Icon} name=${lookOf(view).key} /></b>${stateWord(view)}
  ${whyNoPhase(view) === null && html` <span class="dim">${view.phase}</span>`}`;

function Tags({ view }) {
  const tags = [...tagsOf(view).filter((tag) => !tag.startsWith("name: ") && !tag.startsWith(`${grouping.value}: `)), ...(view.tenant === null ? [] : [`tenant ${view.tenant}`])];
  return html`<span class="tags" title=${tags.join("\n")}>${tags.map((tag) => html`<span class="tag">${tag}</span>`)}</span>`;
}

const Resume = (waited) => html`<span title=${waits(waited)} style=${{ wordSpacing: "-2px" }}>${[waited.queue, waited.restore, waited.prefill].map(milliseconds).join(" · ")}</span>`;

function Returns({ view }) {
  const left = leftOf(view, now.value);
  if (left === null) return html`<span class="dim">–</span>`;
  return left > 0 ? `in ${coarse(left)}` : html`<span class="late">${coarse(-left)} late</span>`;
}

/** Those that are shown. */
export const columns = computed(() =>
  isPhone.value ? COLUMNS.filter(({ onPhone }) => onPhone).map((column) => ({ ...column, width: column.onPhone })) : COLUMNS);

export function Row({ id, index }) {
  const view = sessionOf(id).value;
  if (view === null) return null;
  return html`<tr aria-rowindex=${index + 2} data-id=${id} onClick=${(event) => isOnNothing(event) && go(linkTo(id))}>
    ${columns.value.map(({ title, isNumber, cell }) => html`<td key=${title} class=${isNumber ? "number" : null}>${cell(view)}</td>`)}
    ${!isPhone.value && html`<td class="actions"><div><${Actions} view=${view} /></div></td>`}
  </tr>`;
}

/** Whether a click has hit no control, and ends no selection of text. */
const isOnNothing = ({ target }) => !target.closest("a, button") && getSelection().isCollapsed;

function Actions({ view }) {
  const refusal = refusalOf(view.id).value;
  if (refusal && !isPast(refusal)) {
    return html`<span class="failure" role="alert" title=${refusal.message}>${refusal.message}</span>
      <button class="quiet" aria-label="Close this message" onClick=${() => (refusalOf(view.id).value = null)}><${Icon} name="close" /></button>`;
  }
  const act = isParked(view) ? callBack : park;
  const [word, title] = isParked(view) ? ["Call back", "KV comes back (phase ready)"] : ["Park", "KV leaves the device (phase io_wait)"];
  return html`
    <${Button} why=${whyNoPhase(view)} title=${title} aria-label=${`${word} ${nameOf(view)}`} onClick=${() => act(view.id)}>${word}<//>
    <${CloseButton} view=${view} aria-label=${`Close ${nameOf(view)}`} />
  `;
}

const isParked = ({ phase }) => phase === "io_wait" || phase === "idle";

/** What can be done to all of these. */
export function Together({ ids, of = "" }) {
  const act = (word, run, kind = null) => html`<${Button} class=${kind} aria-label=${`${word} these ${ids.length}${of}`} onClick=${run}>${word}<//>`;
  return html`${act("Park", () => ids.forEach(park))} ${act("Call back", () => ids.forEach(callBack))} ${act("Close", () => (closing.value = ids), "danger")}`;
}

/** The signal of why a button has done nothing to a session, or null. */
const refusalOf = perSession(null);

/** Why the phase of a session may not be set; null: it may. */
function whyNoPhase({ state }) {
  if (state === "queued" || state === "running") return `A turn is ${state}: the phase can be set when it is over.`;
  return null;
}

export const park = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "io_wait" } }));
export const callBack = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "ready" } }));

async function tell(id, action) {
  const refusal = refusalOf(id);
  refusal.value = null;
  try {
    await action();
  } catch (error) {
    refusal.value = error.status === 404 ? { message: "It is closed, or another tenant's: an operator may only close it." } : error;
  }
}
