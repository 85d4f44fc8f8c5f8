// What an operator should know first: the server in one line, and what is wrong, each with what to do about it.
import { computed } from "@preact/signals";
import { call } from "../lib/api.js";
import { now } from "../lib/clock.js";
import { coarse, counted, milliseconds, nameOf, number, percent } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { memory } from "../state/memory.js";
import { attempt } from "../state/notices.js";
import { linkTo } from "../state/route.js";
import { all, revision } from "../state/sessions.js";
import { order } from "./listing.js";
import { bytesIn, leftOf, TIERS, tierName } from "./looks.js";

/** Seconds that a client may be late, and that a session may hold the device without a turn, before it is said. */
const [LATE_S, SILENT_S] = [2, 60];
/** Shares of a tier: nearly full, and as full as it is worth to look for who holds it. */
const [NEARLY_FULL, CROWDED] = [0.95, 0.6];

const views = computed(() => (void [revision.value, now.value], all()));

/** How the server does, for somebody who has ten seconds. */
export function InWords() {
  const map = memory.value;
  if (map === null || views.value.length === 0) return null;
  const here = views.value.filter((view) => bytesIn(view, "device") > 0);
  const away = views.value.length - here.length;
  const recomputed = views.value.reduce((sum, { usage }) => sum + usage.tokens_recomputed, 0);
  const [wait, cause] = longest(views.value);
  return html`<p class="in-words">
    ${`${number(here.length)} on the device, ${number(away)} away`} · ${counted(recomputed, "token")} recomputed
    ${wait > 0 && html` · longest wait of a first token <b>${milliseconds(wait)}</b> (${cause})`}
  </p>`;
}

/** The longest that a session's last first token has waited, and what for. */
function longest(found) {
  const waits = found.flatMap(({ usage: { resume_ms: each } }) => [[each.queue, "queue"], [each.restore, "restore"], [each.prefill, "prefill"]]);
  return waits.reduce((most, each) => (each[0] > most[0] ? each : most), [0, ""]);
}

export function Findings() {
  const found = [...late(views.value), ...silent(views.value), ...full(), ...waiting(), ...recomputing(views.value)];
  if (found.length === 0) return null;
  return html`<ul class="findings" aria-label="What needs a look">
    ${found.map(({ key, text, action }) => html`<li key=${key} class=${key}><span>${text}</span>${action}</li>`)}
  </ul>`;
}

function* late(found) {
  const ones = found.filter((view) => leftOf(view, now.value) < -LATE_S && leftOf(view, now.value) !== null);
  if (ones.length === 0) return;
  ones.sort((one, other) => one.returns_at - other.returns_at);
  const worst = `${nameOf(ones[0])} by ${coarse(-leftOf(ones[0], now.value))}`;
  yield {
    key: "late",
    text: `${counted(ones.length, "client")} later than announced: ${worst}`,
    action: html`<button onClick=${() => (order.value = { by: "returns", down: false })}>Latest first</button>`,
  };
}

function* silent(found) {
  const device = memory.value?.data.device;
  if (!device || device.owned_bytes < CROWDED * device.total_bytes) return;
  const ones = found.filter(
    (view) => view.state === "idle" && view.phase === "compute" && bytesIn(view, "device") > 0 && now.value - view.used_at > SILENT_S,
  );
  if (ones.length === 0) return;
  const share = ones.reduce((sum, view) => sum + bytesIn(view, "device"), 0) / device.total_bytes;
  const who = ones.length === 1 ? nameOf(ones[0]) : counted(ones.length, "session");
  yield {
    key: "silent",
    text: `${who} ${ones.length === 1 ? "holds" : "hold"} ${percent(share)} of the device without a turn or a signal for a minute`,
    action: html`<${Button} onClick=${() => parkAll(ones)}>Park ${ones.length === 1 ? "it" : "them"}<//>`,
  };
}

function* full() {
  for (const tier of TIERS) {
    const use = memory.value?.data[tier];
    if (!use || use.total_bytes === 0 || use.owned_bytes < NEARLY_FULL * use.total_bytes) continue;
    const text = `${tierName[tier]}: sessions hold ${percent(use.owned_bytes / use.total_bytes)} of it`;
    yield { key: `full ${tier}`, text, action: html`<button onClick=${() => (order.value = { by: tier, down: true })}>Biggest first</button>` };
  }
}

function* waiting() {
  const map = memory.value;
  if (!map?.turns_waiting) return;
  const tenants = Object.entries(map.tenants ?? {}).filter(([, use]) => use.turns_waiting > map.turns_waiting / 2);
  const whose = tenants.length === 1 && map.turns_waiting > 1 ? `, ${number(tenants[0][1].turns_waiting)} of them of tenant ${tenants[0][0]}` : "";
  yield { key: "waiting", text: `${counted(map.turns_waiting, "turn")} in the queue${whose}` };
}

function* recomputing(found) {
  const most = found.reduce((worst, view) => (view.usage.tokens_recomputed > (worst?.usage.tokens_recomputed ?? 0) ? view : worst), null);
  if (most === null) return;
  const text = `${counted(most.usage.tokens_recomputed, "token")} of ${nameOf(most)} recomputed: no tier had kept them`;
  yield { key: "recomputed", text, action: html`<a href=${linkTo(most.id)}>Look at it</a>` };
}

const parkAll = (found) =>
  attempt("Could not park", async () => {
    for (const { id } of found) await call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "io_wait" } });
  });
