// The ground of the board: a lane for each tier, with its budget.
import { signal } from "@preact/signals";
import { bytes, counted, percent } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { memory } from "../../state/memory.js";
import { TIERS, tierName } from "../looks.js";

/** Pixels from the corner of the board to the corner of each lane's field: `[x, y]`. */
export const corners = signal({ device: [0, 0], host: [0, 0], disk: [0, 0] });

const WHERE = {
  device: "where the model reads KV",
  host: "memory of the machine",
  disk: "files, one for each session",
};
const WITHOUT = {
  host: "No host tier: KV that leaves the device is dropped.",
  disk: "No disk tier: the server has no state folder.",
};
const NOTHING = {
  device: "Empty. Open a session and send it a prompt, here or with the API: its KV appears in this lane.",
  host: "Empty. Park a session: its KV comes here, until it is called back.",
  disk: "Empty. KV comes here when its session is away for long, or the host is full.",
};

export const Lanes = () => TIERS.map((tier) => html`<${LaneGround} key=${tier} tier=${tier} />`);

function LaneGround({ tier }) {
  const view = memory.value;
  const use = view?.data[tier];
  return html`<section class=${`lane ${tier} ${use?.total_bytes === 0 ? "without" : ""}`} aria-label=${`${tierName[tier]} tier`}>
    <header>
      <h2 title=${WHERE[tier]}>${tierName[tier]}</h2>
      <span class="dim">${view && use?.total_bytes !== 0 && counted(view.sessions_by_tier[tier], "session")}</span>
      <${Budget} use=${use} tier=${tier} />
      <p class="figures">${use && html`<${Figures} ...${use} />`}</p>
    </header>
    <div class="field" data-tier=${tier}><p class="dim">${use && said(tier, use)}</p></div>
  </section>`;
}

const said = (tier, use) => (use.total_bytes === 0 ? WITHOUT[tier] : use.owned_bytes === 0 ? NOTHING[tier] : null);

function Budget({ use, tier }) {
  const total = use?.total_bytes ?? 0;
  const share = (count) => ({ width: total ? `${(100 * count) / total}%` : "0" });
  const used = total ? percent((use.owned_bytes + use.cached_bytes) / total) : "unknown";
  return html`<div class="budget" role="img" aria-label=${`${tierName[tier]}: ${used} of the budget in use`}>
    <i class="owned" style=${share(use?.owned_bytes ?? 0)}></i><i class="cached" style=${share(use?.cached_bytes ?? 0)}></i>
  </div>`;
}

const Figures = ({ total_bytes: total, owned_bytes: owned, cached_bytes: cached }) => html`
  <span title="held by sessions"><i class="key owned"></i>${bytes(owned)} owned</span>
  <span title="kept for reuse only, gives way"><i class="key cached"></i>${bytes(cached)} cached</span>
  <span title="room for more"><i class="key free"></i>${bytes(Math.max(0, total - owned - cached))} free of ${bytes(total)}</span>
`;
