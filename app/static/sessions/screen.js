// The screen of all sessions: the board, the charts and the table.
import { useEffect } from "preact/hooks";
import { html } from "../lib/html.js";
import { Board } from "./board/board.js";
import { Charts } from "./charts/charts.js";
import { keepListing } from "./listing.js";
import { CreateDialog } from "./open/create.js";
import { DropZone, Imports } from "./open/import.js";
import { CloseDialog } from "./table/close_dialog.js";
import { Table } from "./table/table.js";
import { Tenants } from "./tenants.js";
import { Toolbar } from "./toolbar.js";

export function SessionsScreen() {
  useEffect(keepListing, []);
  return html`<div class="sessions">
    <div class="stack"><${Toolbar} /><${Imports} /></div>
    <div class="overview"><${Board} /><${Charts} /></div>
    <${Table} />
    <${Tenants} />
    <${DropZone} /><${CreateDialog} /><${CloseDialog} />
  </div>`;
}
