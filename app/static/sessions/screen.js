// The screen of all sessions: how many there are, how to get one, the filters, the board, the charts and the tables.
import { useEffect, useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { moment } from "../lib/clock.js";
import { bytes, counted, number, shortId } from "../lib/format.js";
import { html } from "../lib/html.js";
import { LookInside } from "../model/example.js";
import { Button, Folded, isPhone } from "../shell/controls.js";
import { memory } from "../state/memory.js";
import { EXPERIMENTS, linkTo } from "../state/route.js";
import { ids } from "../state/sessions.js";
import { biggestFirst, Findings, InWords } from "./findings.js";
import { Board } from "./board/board.js";
import { Charts } from "./charts.js";
import { chosen, clear, counts, FACETS, group, grouping, groupings, isFiltered, isRoomy, keepListing, listed, order, text, toggle } from "./listing.js";
import { CreateDialog, creating, DropZone, importAll, ImportButton, Imports } from "./open.js";
import { Table, Together } from "./table.js";

export function SessionsScreen() {
  useEffect(keepListing, []);
  return html`<div class="sessions">
    <div class="stack"><${Toolbar} /><${Welcome} /><${Findings} /><${Imports} /></div>
    <${Board} />
    <div class="stack"><${Folded} title="Filters" open=${isFiltered()}><${Filters} /><//><${Table} /><${Closed} /></div>
    <${Folded} title="Activity"><${Charts} /><//>
    <${Tenants} />
    <${DropZone} take=${importAll} /><${CreateDialog} />
  </div>`;
}

const Toolbar = () => html`
  <div class="row heading">
    <h1>Sessions</h1>
    <p class="dim" role="status"><${Shown} /></p>
    <${InWords} />
    <div class="row ends">
      ${ids.value.length > 0 && html`<${LookInside} />`}
      <${ImportButton} />
      <${Button} class="primary" onClick=${() => (creating.value = true)}>New session<//>
    </div>
  </div>
`;

/** Something to begin with, where nothing is open. */
const Welcome = () => ids.value.length === 0 && html`<section class="panel welcome" aria-label="To begin with">
  <p><b>See a model think.</b> Stop it between two layers and read what it would say, or find the head of attention that moves a name.</p>
  <${LookInside} /> <a class="button" href=${EXPERIMENTS}>Which head moves the name?</a>
</section>`;

const Filters = () => html`
  <div class="filters" role="group" aria-label="Filters">
    <input
      type="search" id="search" placeholder="Find an id or a tag" aria-label="Find an id or a tag" value=${text.value}
      onInput=${(event) => (text.value = event.target.value)}
    />
    ${FACETS.map((facet) => html`<${Facet} key=${facet.key} facet=${facet} />`)}
    ${isFiltered() && html`<button class="quiet" onClick=${clear}>Clear the filters</button>`}
    ${isFiltered() && listed.value.length > 0 && html`<span class="row together">All ${number(listed.value.length)}: <${Together} ids=${listed.value} /></span>`}
    <${Order} />
  </div>
`;

function Shown() {
  const total = ids.value.length;
  return isFiltered() ? `${number(listed.value.length)} of ${counted(total, "session")}` : counted(total, "session");
}

function Facet({ facet: { key, title, values } }) {
  const shown = values.filter((value) => chosen.value[key].includes(value) || counts.value[key]?.[value] > 0);
  return shown.length > 0 && html`<fieldset class="facet">
    <legend>${title}</legend>
    ${shown.map((value) => html`<button key=${value} aria-pressed=${chosen.value[key].includes(value)} onClick=${() => toggle(key, value)}>
      ${value} <span class="count">${number(counts.value[key]?.[value] ?? 0)}</span>
    </button>`)}
  </fieldset>`;
}

function Order() {
  return html`<span class="row tight biggest">
    <select aria-label="Group by" value=${grouping.value} onChange=${({ target }) => group(target.value)}><option value="">No groups</option>
      ${groupings.value.map((name) => html`<option key=${name} value=${name}>By ${name}</option>`)}</select>
    ${!isPhone.value && html`<button aria-pressed=${isRoomy.value} onClick=${() => (isRoomy.value = !isRoomy.value)}>Roomy</button>`}
    <button aria-pressed=${order.value.by === "bytes" && order.value.down} onClick=${() => biggestFirst("bytes")}>Biggest first</button>
  </span>`;
}

const TYPING_MS = 400;

/** Sessions that have closed, in which what is searched for was found. */
function Closed() {
  const find = text.value.trim();
  const [page, setPage] = useState(null);
  useEffect(() => {
    const leaving = new AbortController();
    const load = () => call("GET", "/v1/sessions/closed", { query: { find }, signal: leaving.signal }).then(setPage).catch(() => {});
    const timer = find && setTimeout(load, TYPING_MS);
    return () => (setPage(null), clearTimeout(timer), leaving.abort());
  }, [find]);
  return page?.data.length > 0 && html`<section class="dim" aria-label="Closed sessions">
    Closed: <ul class="row">${page.data.map(({ id, name, closed_at }) => html`<li key=${id}><a href=${linkTo(id)}>${name && `${name} `}…${shortId(id)}</a> ${moment(closed_at)}</li>`)}
    ${page.has_more && html`<li>and more</li>`}</ul>
  </section>`;
}

function Tenants() {
  const { tenants } = memory.value ?? {};
  if (!tenants || Object.keys(tenants).length === 0) return null;
  return html`<section class="panel stack tenants">
    <h2>Tenants</h2>
    <div class="wide" tabindex="0" role="region" aria-label="Table of tenants"><table>
      <thead><tr>
        <th scope="col">Tenant</th>
        ${["Sessions", "Turns running", "Turns waiting", "Device", "Host", "Disk"].map((title) => html`<th scope="col" class="number">${title}</th>`)}
      </tr></thead>
      <tbody>${Object.entries(tenants).sort(byMemory).map(([name, use]) => html`<${Tenant} key=${name} name=${name} use=${use} />`)}</tbody>
    </table></div>
    <p class="dim">KV that sessions share counts for each of them.</p>
  </section>`;
}

const Tenant = ({ name, use }) => html`<tr>
  <th scope="row">${name || "none: from before there were tenants"}</th>
  ${[use.sessions, use.turns_running, use.turns_waiting].map((count) => html`<td class="number">${number(count)}</td>`)}
  ${[use.device_bytes, use.host_bytes, use.disk_bytes].map((count) => html`<td class="number">${bytes(count)}</td>`)}
</tr>`;

const total = ([, use]) => use.device_bytes + use.host_bytes + use.disk_bytes;
const byMemory = (one, other) => total(other) - total(one);
