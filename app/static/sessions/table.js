// All sessions that pass the filters, in groups if one likes, and what can be done to each. Only the rows in view are in
// the document.
import { computed } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { now } from "../lib/clock.js";
import { bytes, coarse, counted, milliseconds, nameOf, number, shortId, waits } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button, isPhone, Named } from "../shell/controls.js";
import { CloseButton, closing, Dialog } from "../shell/dialog.js";
import { Icon } from "../shell/icons.js";
import { isAway } from "../state/connection.js";
import { complain } from "../state/notices.js";
import { perKey } from "../state/per_key.js";
import { go, linkTo } from "../state/route.js";
import { ids, sessionOf, turnWord } from "../state/sessions.js";
import { clear, folded, grouping, isRoomy, listed, order, rows, sortBy } from "./listing.js";
import { bytesIn, leftOf, lookOf, tagsOf, tierName, TIERS } from "./looks.js";
import { creating } from "./open.js";

const size = (count) => (count === 0 ? html`<span class="dim">${bytes(0)}</span>` : bytes(count));

/** A column sorts by `by`. `width` is in pixels, the minimum for one that `grows`. A phone shows only some. */
const COLUMNS = [
  { title: "Session", by: "name", width: 176, grows: "18%", onPhone: 114, cell: (view) => html`<${Name} view=${view} />` },
  { title: "Tags", width: 112, grows: "auto", cell: (view) => html`<${Tags} view=${view} />` },
  { title: "Turn, phase", about: "what its turn does, or without one the phase that its client has said", by: "turn", width: 104, onPhone: 96, cell: (view) => html`<${Doing} view=${view} />` },
  { title: "Tokens", by: "tokens", width: 64, onPhone: 60, isNumber: true, cell: (view) => number(view.tokens) },
  ...TIERS.map((by) => ({ title: tierName[by], by, width: 68, isNumber: true, cell: (view) => size(bytesIn(view, by)) })),
  { title: "Queue, restore, prefill", about: "what the last turn's first token waited for", by: "resume", width: 176, isNumber: true, cell: (view) => html`<${Resume} ...${view.usage.resume_ms} />` },
  { title: "Created", by: "created", width: 84, isNumber: true, cell: (view) => `${coarse(now.value - view.created_at)} ago` },
  { title: "Returns", about: "when the client has said that it comes back", by: "returns", width: 84, isNumber: true, onPhone: 84, cell: (view) => html`<${Returns} view=${view} />` },
];

const Name = ({ view }) => html`<a class="name" href=${linkTo(view.id)} title=${view.id}><${Named} view=${view} /></a>`;

/** In the words of the board, but of a server that is away it is what the session did. */
function Doing({ view }) {
  const { key } = lookOf(view);
  return html`<b class="swatch ${key}" aria-hidden="true"><${Icon} name=${key} /></b>${isAway() ? turnWord(view) : key}`;
}

function Tags({ view }) {
  const tags = [...tagsOf(view).filter((tag) => !tag.startsWith("name: ") && !tag.startsWith(`${grouping.value}: `)), ...(view.tenant === null ? [] : [`tenant ${view.tenant}`])];
  return html`<span class="tags" title=${tags.join("\n")}>${tags.map((tag) => html`<span class="tag">${tag}</span>`)}</span>`;
}

const Resume = (waited) => html`<span title=${waits(waited)} style=${{ wordSpacing: "-2px" }}>${[waited.queue, waited.restore, waited.prefill].map(milliseconds).join(" · ")}</span>`;

function Returns({ view }) {
  const left = leftOf(view, now.value);
  if (left === null) return html`<span class="dim">–</span>`;
  return left > 0.5 ? `in ${coarse(left)}` : left > -1 ? "now" : html`<span class="late">${coarse(-left)} late</span>`;
}

/** Those that are shown. */
const columns = computed(() =>
  isPhone.value ? COLUMNS.filter(({ onPhone }) => onPhone).map((column) => ({ ...column, width: column.onPhone, grows: column.grows && "auto" })) : COLUMNS);

/** Pixels of a row; a finger needs more. */
const height = computed(() => (isRoomy.value || isPhone.value ? 40 : 28));
const MORE = 6;
const actionsWidth = computed(() => (isPhone.value ? 40 : 148));

export function Table() {
  const frame = useRef(null);
  const [window, setWindow] = useState({ first: 0, count: 20 });
  const look = () => frame.current && setWindow((old) => kept(old, seen(frame.current)));
  useEffect(() => {
    const observer = new ResizeObserver(look);
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  useEffect(look, [height.value]);
  const minWidth = columns.value.reduce((sum, { width }) => sum + width, actionsWidth.value);
  return html`<div class="table-frame" ref=${frame} tabindex="0" role="region" aria-label="Table of sessions" onScroll=${look}>
    <table aria-rowcount=${rows.value.length + 1} style=${{ minWidth: `${minWidth}px`, "--row": `${height.value}px` }}>
      <${Head} />
      <${Rows} ...${window} />
    </table>
    <${Nothing} />
    <${Sheet} />
  </div>`;
}

const Head = () => html`
  <colgroup>${columns.value.map(({ title, width, grows }) => html`<col key=${title} style=${{ width: grows ?? `${width}px` }} />`)}<col style=${{ width: `${actionsWidth.value}px` }} /></colgroup>
  <thead><tr aria-rowindex="1">
    ${columns.value.map((column) => html`<${Title} key=${column.title} ...${column} />`)}
    <th scope="col" class="actions"><span class=${isPhone.value ? "hidden" : null}>Actions</span></th>
  </tr></thead>
`;

function Title({ title, about, by, isNumber }) {
  const isSorted = by !== undefined && order.value.by === by;
  const sort = isSorted ? (order.value.down ? "descending" : "ascending") : null;
  return html`<th scope="col" class=${isNumber ? "number" : null} aria-sort=${sort} title=${about}>
    ${by === undefined ? title : html`<button class="quiet" onClick=${() => sortBy(by)}>${title}${sort && html` <${Icon} name=${sort} />`}</button>`}
  </th>`;
}

function Rows({ first, count }) {
  const all = rows.value;
  const start = Math.max(0, Math.min(first, all.length - count));
  const shown = all.slice(start, start + count);
  return html`<tbody>
    <${Space} rows=${start} />
    ${shown.map((each, index) => (each.ids ? html`<${Group} key=${`of ${each.name}`} ...${each} index=${start + index} />` : html`<${Row} key=${each} id=${each} index=${start + index} />`))}
    <${Space} rows=${all.length - start - shown.length} />
  </tbody>`;
}

/** What its sessions have in common, and what can be done to all of them. */
function Group({ name, ids, bytes: held, isFolded, index }) {
  const fold = () => (folded.value = isFolded ? folded.value.filter((each) => each !== name) : [...folded.value, name]);
  return html`<tr class="group" aria-rowindex=${index + 2}>
    <td colspan=${columns.value.length - !isPhone.value}><button class="quiet" aria-expanded=${!isFolded} onClick=${fold}>
      <${Icon} name=${isFolded ? "folded" : "open"} /> ${name || `no ${grouping.value}`}</button> <span class="dim" title="Shared KV counts for each, up to what its tier holds">${counted(ids.length, "session")} · ${bytes(held)}</span></td>
    <td class="actions" colspan=${isPhone.value ? 1 : 2}><div><${More} name=${name || "no group"} ids=${ids}><${Together} ids=${ids} of=${` of ${name}`} /><//></div></td>
  </tr>`;
}

/** As high as the rows that are not there. */
const Space = ({ rows }) => rows > 0 && html`<tr aria-hidden="true" style=${{ height: `${rows * height.value}px` }}></tr>`;

function Nothing() {
  if (listed.value.length > 0) return null;
  if (ids.value.length > 0) {
    return html`<p class="nothing">No session passes the filters. <button onClick=${clear}>Clear the filters</button></p>`;
  }
  return html`<p class="nothing">
    No session is open. <${Button} onClick=${() => (creating.value = true)}>Open one<//> or drop an exported file
    here. Sessions of the API appear by themselves.
  </p>`;
}

const seen = (frame) => ({
  first: Math.max(0, Math.floor(frame.scrollTop / height.value) - MORE),
  count: Math.ceil(frame.clientHeight / height.value) + 2 * MORE,
});

const kept = (old, next) => (old.first === next.first && old.count === next.count ? old : next);

function Row({ id, index }) {
  const view = sessionOf(id).value;
  if (view === null) return null;
  return html`<tr aria-rowindex=${index + 2} data-id=${id} onClick=${(event) => isOnNothing(event) && go(linkTo(id))}>
    ${columns.value.map(({ title, isNumber, cell }) => html`<td key=${title} class=${isNumber ? "number" : null}>${cell(view)}</td>`)}
    <td class="actions"><div><${More} name=${nameOf(view)} ids=${[id]}><${Actions} view=${view} /><//></div></td>
  </tr>`;
}

/** Whether a click has hit no control, and ends no selection of text. */
const isOnNothing = ({ target }) => !target.closest("a, button") && getSelection().isCollapsed;

function Actions({ view }) {
  const act = isParked(view) ? callBack : park;
  const [word, title] = isParked(view) ? ["Call back", "KV comes back (phase ready)"] : ["Park", "KV leaves the device (phase io_wait)"];
  return html`
    <${Button} why=${whyNoPhase(view)} title=${title} aria-label=${`${word} ${nameOf(view)}`} onClick=${() => act(view.id)}>${word}<//>
    <${CloseButton} view=${view} aria-label=${`Close ${nameOf(view)}`} />
  `;
}

const isParked = ({ phase }) => phase === "io_wait" || phase === "idle";

/** What can be done to all of these. One that is parked is not told to park again: it may have said when it returns. */
export function Together({ ids, of = "" }) {
  const act = (word, run, kind = null) => html`<${Button} class=${kind} aria-label=${`${word} these ${ids.length}${of}`} onClick=${run}>${word}<//>`;
  const those = (parked) => ids.filter((id) => sessionOf(id).peek() && isParked(sessionOf(id).peek()) === parked);
  return html`${act("Park", () => those(false).forEach(park))} ${act("Call back", () => those(true).forEach(callBack))} ${act("Close", () => (closing.value = ids), "danger")}`;
}

/** What the sheet is about, `{name, ids}`, or null. */
const touched = perKey(null);

/** Buttons; a phone has one in their place, which opens a sheet. */
const More = ({ name, ids: its, children }) => (isPhone.value
  ? html`<${Button} class="quiet" aria-haspopup="dialog" aria-label="What to do with ${name}" onClick=${() => (touched.value = { name, ids: its })}>⋯<//>` : children);

function Sheet() {
  const close = () => (touched.value = null);
  return touched.value && html`<${Dialog} title=${touched.value.name} onClose=${close}>
    <div class="row" onClick=${close}><${Together} ids=${touched.value.ids} /><button>Leave it</button></div>
  <//>`;
}

/** Why the phase of a session may not be set; null: it may. */
function whyNoPhase({ state }) {
  if (state === "queued" || state === "running") return `A turn is ${state}: the phase can be set when it is over.`;
  return null;
}

/** What sets the phase of the session with that id. A refusal is a message: the row may be out of view. */
const tell = (phase) => (id) => call("POST", `/v1/sessions/${id}/phase`, { body: { phase } }).catch((error) => complain(shortId(id), error));
export const park = tell("io_wait");
const callBack = tell("ready");
