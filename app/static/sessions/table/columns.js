// The columns of the table, and what stands in them.
import { now } from "../../lib/clock.js";
import { bytes, coarse, milliseconds, number, shortId, waits } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { linkTo } from "../../state/route.js";
import { stateWord } from "../../state/sessions.js";
import { bytesIn, lookOf, tagsOf, tierName, TIERS } from "../looks.js";

const size = (count) => (count === 0 ? html`<span class="dim">${bytes(0)}</span>` : bytes(count));

/** `by` is what a column is sorted by; `width` is in pixels. */
export const COLUMNS = [
  { title: "Session", by: "id", width: 76, cell: (view) => html`<a class="mono" href=${linkTo(view.id)} title=${view.id}>${shortId(view.id)}</a>` },
  { title: "Tags", width: 125, cell: (view) => html`<${Tags} view=${view} />` },
  { title: "State", by: "state", width: 104, cell: (view) => html`<b class="swatch ${lookOf(view).key}" aria-hidden="true">${lookOf(view).glyph}</b>${stateWord(view)}` },
  { title: "Phase", by: "phase", width: 72, cell: (view) => view.phase },
  { title: "Tokens", by: "tokens", width: 76, isNumber: true, cell: (view) => number(view.tokens) },
  ...TIERS.map((by) => ({ title: tierName[by], by, width: 76, isNumber: true, cell: (view) => size(bytesIn(view, by)) })),
  { title: "Last resume", about: "what the last turn's first token waited for: queue, restore, prefill", by: "resume", width: 169, isNumber: true, cell: (view) => html`<${Resume} ...${view.usage.resume_ms} />` },
  { title: "Created", by: "created", width: 98, isNumber: true, cell: (view) => `${coarse(now.value - view.created_at)} ago` },
  { title: "Expires", by: "expires", width: 84, isNumber: true, cell: (view) => html`<${Expires} at=${view.expires_at} />` },
];

function Tags({ view }) {
  const tags = [...tagsOf(view), ...(view.tenant === null ? [] : [`tenant ${view.tenant}`])];
  return html`<span class="tags" title=${tags.join("\n")}>${tags.map((tag) => html`<span class="tag">${tag}</span>`)}</span>`;
}

const Resume = (waited) => html`<span title=${waits(waited)} style=${{ wordSpacing: "-2px" }}>${[waited.queue, waited.restore, waited.prefill].map(milliseconds).join(" · ")}</span>`;

function Expires({ at }) {
  if (at === null) return html`<span class="dim" title="not during a turn">–</span>`;
  return `in ${coarse(at - now.value)}`;
}
