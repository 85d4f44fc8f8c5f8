// The columns of the table, and what stands in them.
import { now } from "../../lib/clock.js";
import { ago, bytes, number, seconds, shortId } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { linkTo } from "../../state/route.js";
import { bytesIn, bytesOf, lookOf, tagsOf } from "../looks.js";

const size = (count) => (count === 0 ? html`<span class="dim">0</span>` : bytes(count));
const ms = (count) => (count > 0 ? seconds(count / 1000) : "0");

/** `by` is what a column is sorted by; `width` is in pixels. */
export const COLUMNS = [
  { title: "Session", by: "id", width: 112, cell: (view) => html`<a class="mono" href=${linkTo(view.id)} title=${view.id}>${shortId(view.id)}</a>` },
  { title: "Tags", width: 190, cell: (view) => html`<${Tags} view=${view} />` },
  { title: "State", by: "state", width: 116, cell: (view) => html`<b class="swatch ${lookOf(view).key}" aria-hidden="true">${lookOf(view).glyph}</b>${view.state}` },
  { title: "Phase", by: "phase", width: 84, cell: (view) => view.phase },
  { title: "Tokens", by: "tokens", width: 80, isNumber: true, cell: (view) => number(view.tokens) },
  { title: "KV", by: "bytes", width: 88, isNumber: true, cell: (view) => size(bytesOf(view)) },
  { title: "Device", by: "device", width: 88, isNumber: true, cell: (view) => size(bytesIn(view, "device")) },
  { title: "Host", by: "host", width: 88, isNumber: true, cell: (view) => size(bytesIn(view, "host")) },
  { title: "Disk", by: "disk", width: 88, isNumber: true, cell: (view) => size(bytesIn(view, "disk")) },
  { title: "Last resume", about: "what the last turn's first token waited for: queue, restore, prefill", by: "resume", width: 170, isNumber: true, cell: (view) => html`<${Resume} ...${view.usage.resume_ms} />` },
  { title: "Created", by: "created", width: 96, isNumber: true, cell: (view) => (void now.value, ago(view.created_at)) },
  { title: "Expires", by: "expires", width: 90, isNumber: true, cell: (view) => html`<${Expires} at=${view.expires_at} />` },
];

function Tags({ view }) {
  const tags = [...(view.tenant === null ? [] : [`tenant ${view.tenant}`]), ...tagsOf(view)];
  return html`<span title=${tags.join("\n")}>${tags.map((tag) => html`<span class="tag">${tag}</span>`)}</span>`;
}

const Resume = ({ queue, restore, prefill }) => html`<span
  title=${`queue ${ms(queue)}, restore ${ms(restore)}, prefill ${ms(prefill)}`}
>${ms(queue)} · ${ms(restore)} · ${ms(prefill)}</span>`;

function Expires({ at }) {
  if (at === null) return html`<span class="dim" title="not during a turn">–</span>`;
  const left = at - now.value;
  return left > 2 * 86400 ? `in ${Math.round(left / 86400)} days` : `in ${seconds(Math.max(0, left))}`;
}
