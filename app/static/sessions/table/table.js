// All sessions that pass the filters. Only the rows in view are in the document.
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "../../lib/html.js";
import { Button } from "../../shell/controls.js";
import { ids } from "../../state/sessions.js";
import { isPhone } from "../../state/window.js";
import { clear, listed, order, sortBy } from "../listing.js";
import { creating } from "../open/create.js";
import { columns, Row } from "./row.js";

/** Pixels of a row; the stylesheet says the same. */
const ROW = 34;
const MORE = 6;
const ACTIONS_WIDTH = 204;

export function Table() {
  const frame = useRef(null);
  const [window, setWindow] = useState({ first: 0, count: 20 });
  const look = () => frame.current && setWindow((old) => kept(old, seen(frame.current)));
  useEffect(() => {
    const observer = new ResizeObserver(look);
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  const minWidth = columns.value.reduce((sum, { width }) => sum + width, isPhone.value ? 0 : ACTIONS_WIDTH);
  return html`<div class="table-frame" ref=${frame} tabindex="0" role="region" aria-label="Table of sessions" onScroll=${look}>
    <table aria-rowcount=${listed.value.length + 1} style=${{ minWidth: `${minWidth}px` }}>
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
  const all = listed.value;
  const start = Math.max(0, Math.min(first, all.length - count));
  const shown = all.slice(start, start + count);
  return html`<tbody>
    <${Space} rows=${start} />
    ${shown.map((id, index) => html`<${Row} key=${id} id=${id} index=${start + index} />`)}
    <${Space} rows=${all.length - start - shown.length} />
  </tbody>`;
}

/** As high as the rows that are not there. */
const Space = ({ rows }) => rows > 0 && html`<tr aria-hidden="true" style=${{ height: `${rows * ROW}px` }}></tr>`;

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
  first: Math.max(0, Math.floor(frame.scrollTop / ROW) - MORE),
  count: Math.ceil(frame.clientHeight / ROW) + 2 * MORE,
});

const kept = (old, next) => (old.first === next.first && old.count === next.count ? old : next);
