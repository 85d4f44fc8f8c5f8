// Memory, moves and the queue over the last ten minutes.
import { html } from "../../lib/html.js";
import { TIERS } from "../looks.js";
import { MemoryChart } from "./memory_chart.js";
import { MovesChart } from "./moves_chart.js";
import { QueueChart } from "./queue_chart.js";

const HEIGHT = 84;

export const Charts = () => html`<section class="charts" aria-label="The last 10 minutes">
  ${TIERS.map((tier) => html`<${MemoryChart} key=${tier} tier=${tier} height=${HEIGHT} />`)}
  <${MovesChart} height=${HEIGHT} />
  <${QueueChart} height=${HEIGHT} />
</section>`;
