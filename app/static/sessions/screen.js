// The screen of all sessions: the board, the charts and the tables.
import { useEffect } from "preact/hooks";
import { bytes, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { DropZone } from "../shell/import.js";
import { memory } from "../state/memory.js";
import { Board } from "./board/board.js";
import { Charts } from "./charts/charts.js";
import { keepListing } from "./listing.js";
import { CreateDialog } from "./open/create.js";
import { importAll, Imports } from "./open/import.js";
import { Table } from "./table/table.js";
import { Toolbar } from "./toolbar.js";

export function SessionsScreen() {
  useEffect(keepListing, []);
  return html`<div class="sessions">
    <div class="stack"><${Toolbar} /><${Imports} /></div>
    <div class="overview"><${Board} /><${Charts} /></div>
    <${Table} />
    <${Tenants} />
    <${DropZone} take=${importAll} /><${CreateDialog} />
  </div>`;
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
