// What an operator should know first: the server in one line, and what is wrong, each with what to do about it.
import { computed } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { now } from "../lib/clock.js";
import { counted, milliseconds, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { connection } from "../state/connection.js";
import { findings, loadToday, memory, today } from "../state/memory.js";
import { linkTo } from "../state/route.js";
import { all, revision } from "../state/sessions.js";
import { clear, order, picked, text, toggle } from "./listing.js";
import { bytesOf } from "./looks.js";
import { park } from "./table.js";

const views = computed(() => (void [revision.value, now.value], all()));

/** How the server does, for somebody who has ten seconds. */
export function InWords() {
  const { capacity } = findings.value;
  const day = new Date(1000 * now.value).toDateString();
  const { state } = connection.value;
  useEffect(() => void (state === "live" && loadToday().catch(() => {})), [state, day]);
  const held = views.value.map(bytesOf).filter(Boolean);
  if (held.length === 0) return null;
  const places = Math.floor((memory.value?.data.device.total_bytes ?? 0) * held.length / held.reduce((sum, each) => sum + each));
  const { recomputed, wait, cause } = today.value ?? {};
  return html`<p class="in-words">
    <b>${counted(held.length, "agent")}</b>, device for <b>${number(places)}</b>
    ${today.value && html` · <b>${number(recomputed)}</b> recomputed today`}
    ${wait > 0 && html`, worst wait <b>${milliseconds(wait)}</b>${cause && ` (${cause})`}`}
    ${capacity && html` · <span title=${capacity.text}>room for <b>${number(capacity.more)} more</b> like these</span>`}
  </p>`;
}

/** As the server tells them, which `djinn top` has too. */
export function Findings() {
  const { data } = findings.value;
  return data.length > 0 && html`<ul class="findings" aria-label="What needs a look">
    ${data.map((each) => html`<li key=${each.kind + (each.tenant ?? each.sessions[0] ?? each.text.replace(/\d/g, ""))}><span>${each.text}</span><${Remedy} ...${each} /></li>`)}
  </ul>`;
}

/** What helps, or who it is. */
function Remedy({ kind, sessions, tenant }) {
  const filter = (on) => () => (clear(), on(), bring(".table-frame"));
  if (tenant) return html`<button onClick=${filter(() => (text.value = tenant))}>Show its sessions</button>`;
  if (kind === "waiting") return html`<button onClick=${filter(() => toggle("turn", "queued"))}>Show them</button>`;
  if (BIGGEST[kind]) return html`<button onClick=${() => biggestFirst(BIGGEST[kind])}>Biggest first</button>`;
  if (ABOUT[kind]) return html`<a class="button" href="docs#/${ABOUT[kind]}">What it means</a>`;
  if (!sessions[0]) return html`<button onClick=${() => bring(".charts")}>Show the activity</button>`;
  const show = filter(() => {
    picked.value = sessions;
    if (kind === "late") order.value = { by: "returns", down: false };
  });
  return html`${kind === "silent" && html`<${Button} onClick=${() => sessions.forEach(park)}>Park ${sessions[1] ? "them" : "it"}<//>`}
    ${sessions[1] ? html`<button onClick=${show}>Show them</button>` : html`<a class="button" href=${linkTo(sessions[0])}>Look at it</a>`}`;
}

/** What the table is sorted by where a tier is full. */
const BIGGEST = { device: "device", host: "host", kv_disk: "disk", disk: "disk" };
/** The route that tells more. */
const ABOUT = { unready: "system/getReady", replica: "sessions/settleSession", connections: "system/getMetrics" };

export function biggestFirst(by) {
  order.value = { by, down: true };
  bring(".table-frame");
}

/** Into view, on a phone too, which folds parts. */
function bring(part) {
  const found = document.querySelector(part);
  found.closest("details")?.setAttribute("open", "");
  found.scrollTop = 0;
  found.scrollIntoView({ block: "nearest" });
}
