// All sessions that pass the filters, in groups if one likes. Only the rows in view are in the document.
import { computed } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, counted } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Button } from "../../shell/controls.js";
import { ids } from "../../state/sessions.js";
import { isPhone } from "../../state/window.js";
import { clear, folded, grouping, isRoomy, listed, order, rows, sortBy } from "../listing.js";
import { creating } from "../open/create.js";
import { columns, Row, Together } from "./row.js";

/** Pixels of a row; a finger needs more. */
const height = computed(() => (isRoomy.value || isPhone.value ? 40 : 28));
const MORE = 6;
const ACTIONS_WIDTH = 136;

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
  const minWidth = columns.value.reduce((sum, { width }) => sum + width, isPhone.value ? 0 : ACTIONS_WIDTH);
  return html`<div class="table-frame" ref=${frame} tabindex="0" role="region" aria-label="Table of sessions" onScroll=${look}>
    <table aria-rowcount=${rows.value.length + 1} style=${{ minWidth: `${minWidth}px`, "--row": `${height.value}px` }}>
      <${Head} />
      <${Rows} ...${window} />
    </table>
    <${Nothing} />
  </div>`;
}

const Head = () => html`
  <colgroup>${columns.value.map(({ title, width }) => html`<col key=${title} style=${{ width: `${width}px` }} />`)}${!isPhone.value && html`<col style=${{ width: `${ACTIONS_WIDTH}px` }} />`}</colgroup>
  <thead><tr aria-rowindex="1">
    ${columns.value.map((column) => html`<${Title} key=${column.title} ...${column} />`)}
    ${!isPhone.value && html`<th scope="col" class="actions">Actions</th>`}
  </tr></thead>
`;

function Title({ title, about, by, isNumber }) {
  const isSorted = by !== undefined && order.value.by === by;
  const sort = isSorted ? (order.value.down ? "descending" : "ascending") : null;
  return html`<th scope="col" class=${isNumber ? "number" : null} aria-sort=${sort} title=${about}>
    ${by === undefined ? title : html`<button class="quiet" onClick=${() => sortBy(by)}>${title}<span aria-hidden="true">${sort && (order.value.down ? " ↓" : " ↑")}</span></button>`}
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
      <span aria-hidden="true">${isFolded ? "▸" : "▾"}</span> ${name || `no ${grouping.value}`}</button> <span class="dim">${counted(ids.length, "session")} · ${bytes(held)}</span></td>
    ${!isPhone.value && html`<td class="actions" colspan="2"><div><${Together} ids=${ids} of=${` of ${name}`} /></div></td>`}
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
