// What an operator should know first: the server in one line, and what is wrong, each with what to do about it.
import { computed } from "@preact/signals";
import { now } from "../lib/clock.js";
import { milliseconds, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { findings } from "../state/memory.js";
import { linkTo } from "../state/route.js";
import { all, revision } from "../state/sessions.js";
import { order, picked, text } from "./listing.js";
import { bytesIn, bytesOf } from "./looks.js";
import { park } from "./table.js";

const views = computed(() => (void [revision.value, now.value], all()));

/** How the server does, for somebody who has ten seconds. */
export function InWords() {
  const { capacity } = findings.value;
  if (views.value.length === 0) return null;
  const held = views.value.filter((view) => bytesOf(view) > 0);
  const here = held.filter((view) => bytesIn(view, "device") > 0);
  const recomputed = views.value.reduce((sum, { usage }) => sum + usage.tokens_recomputed, 0);
  const [wait, cause] = longest(views.value);
  return html`<p class="in-words">
    <b>${number(here.length)}</b> on the device, <b>${number(held.length - here.length)}</b> away · <b>${number(recomputed)}</b> ${recomputed === 1 ? "token" : "tokens"} recomputed
    ${wait > 0 && html` · longest wait of a first token <b>${milliseconds(wait)}</b> (${cause})`}
    ${capacity && html` · <span title=${capacity.text}>room for <b>${number(capacity.more)} more</b> like these</span>`}
  </p>`;
}

/** The longest that a session's last first token has waited, and what for. */
function longest(found) {
  const waits = found.flatMap(({ usage: { resume_ms: each } }) => [[each.queue, "queue"], [each.restore, "restore"], [each.prefill, "prefill"]]);
  return waits.reduce((most, each) => (each[0] > most[0] ? each : most), [0, ""]);
}

/** As the server tells them, which `djinn top` has too. */
export function Findings() {
  const { data } = findings.value;
  return data.length > 0 && html`<ul class="findings" aria-label="What needs a look">
    ${data.map((each) => html`<li key=${each.text} class=${each.kind}><span>${each.text}</span><${Remedy} ...${each} /></li>`)}
  </ul>`;
}

/** What helps, or who it is. */
function Remedy({ kind, sessions, tenant }) {
  if (tenant) return html`<button onClick=${() => (text.value = tenant)}>Show its sessions</button>`;
  if (BIGGEST[kind]) return html`<button onClick=${() => (order.value = { by: BIGGEST[kind], down: true })}>Biggest first</button>`;
  const show = () => {
    picked.value = sessions;
    if (kind === "late") order.value = { by: "returns", down: false };
  };
  return html`${kind === "silent" && html`<${Button} onClick=${() => sessions.forEach(park)}>Park ${sessions[1] ? "them" : "it"}<//>`}
    ${sessions[1] ? html`<button onClick=${show}>Show them</button>` : sessions[0] && html`<a class="button" href=${linkTo(sessions[0])}>Look at it</a>`}`;
}

/** What the table is sorted by where a tier is full. */
const BIGGEST = { device: "device", host: "host", kv_disk: "disk" };
