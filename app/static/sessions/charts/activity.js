// How busy the server was, for up to 30 days: agents, tokens and the longest waits, and when it started.
import { computed, useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { call } from "../../lib/api.js";
import { moment, serverTime } from "../../lib/clock.js";
import { counted, milliseconds, number, short } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { connection } from "../../state/connection.js";
import { perKey } from "../../state/per_key.js";
import { Chart, ChartPanel, peak, WHOLE } from "./chart.js";

const [MINUTE, HOUR, DAY] = [60, 3600, 86_400];
/** What can be looked at: the last `span` seconds, summed over `sum` each, with a tick each `tick`, told in `size`. */
const RANGES = [
  { name: "Last hour", span: HOUR, sum: MINUTE, unit: "each minute", tick: 15 * MINUTE, size: MINUTE, word: "min" },
  { name: "Last day", span: DAY, sum: 10 * MINUTE, unit: "each 10 minutes", tick: 6 * HOUR, size: HOUR, word: "h" },
  { name: "Last 30 days", span: 30 * DAY, sum: HOUR, unit: "each hour", tick: 10 * DAY, size: DAY, word: "d" },
];
const EVERY_MS = 60_000;

/** What is drawn, one chart beside the other, and the least that its axis shows. */
const ROWS = [
  { name: "agents", token: "--accent", format: number, least: 2 },
  { name: "tokens", token: "--good", format: short, least: 10 },
  { name: "longest wait", token: "--warn", format: milliseconds, least: 10 },
];

export function Activity() {
  const range = useSignal(RANGES[0]);
  const { name, span, unit } = range.value;
  const { state } = connection.value;
  useEffect(() => {
    if (state !== "live") return undefined;
    const leaving = new AbortController();
    const load = () => loadActivity(serverTime() - span, leaving.signal).catch(() => {}); // the next one may succeed
    load();
    const timer = setInterval(load, EVERY_MS);
    return () => (clearInterval(timer), leaving.abort());
  }, [span, state]);
  const sums = useMemo(() => computed(() => summed(activity.value, range.value)), []);
  const drawn = useMemo(() => ROWS.map((row) => computed(() => [sums.value.times, sums.value[row.name]])), []);
  const { starts, turns, computed: tokens, cached } = sums.value;
  const texts = [
    [number(peak(sums.value.agents)), "most that had turns in the same minute"],
    [number(tokens), `computed in ${counted(turns, "turn")}; ${number(cached)} more were cached`],
    [milliseconds(peak(sums.value["longest wait"])), "for a first token"],
  ];
  const lines = [
    ...ROWS.map((row, at) => ({ ...row, text: texts[at][0], about: texts[at][1] })),
    { token: "--dim", name: "starts", text: number(starts.length), about: "of the server: dashed lines" },
  ];
  const choice = html`<select aria-label="Time of the activity" value=${name} onChange=${({ target }) => (range.value = RANGES[target.selectedIndex])}>
    ${RANGES.map((each) => html`<option key=${each.name}>${each.name}</option>`)}
  </select>`;
  return html`<${ChartPanel} title="Activity" unit=${unit} lines=${lines} choice=${choice}>
    <div class="across">${ROWS.map(({ token, format, least }, at) => html`<${Chart} key=${token} data=${drawn[at]} span=${span} marks=${starts}
      label=${`${name}, ${lines[at].name}: ${lines[at].text}, ${lines[at].about}. Starts of the server: ${starts.length}.`}
      ticks=${ticksOf(range.value)} height=${74} format=${format} steps=${WHOLE} most=${(max) => Math.max(least, 1.15 * max)}
      series=${[{ token, fill: 25, isStepped: true }]} />`)}</div>
  <//>`;
}

const ticksOf = ({ span, tick, size, word }) =>
  Array.from({ length: Math.floor(span / tick) + 1 }, (_each, at) => [-at * tick, at === 0 ? "now" : `${(-at * tick) / size} ${word}`]);

/** Lists by the names of `ROWS`, `times` in seconds before now, and `starts`, marks of a chart; `turns`, and tokens
 * that were `computed` and `cached`, of all. */
function summed({ until, minutes, marks }, { span, sum }) {
  const first = Math.floor((until - span) / sum) + 1;
  const length = Math.floor(until / sum) - first + 1;
  const [agents, tokens, waits] = ROWS.map(() => Array(length).fill(0));
  let [turns, cached] = [0, 0];
  for (const each of minutes) {
    const at = Math.floor(each.at / sum) - first;
    if (at < 0) continue;
    agents[at] = Math.max(agents[at], each.agents);
    tokens[at] += each.prompt_tokens - each.cached_tokens + each.completion_tokens;
    waits[at] = Math.max(waits[at], each.worst_ms);
    turns += each.turns;
    cached += each.cached_tokens;
  }
  const lists = { agents, tokens, "longest wait": waits };
  const all = tokens.reduce((sum, each) => sum + each, 0);
  for (const list of Object.values(lists)) list.push(list.at(-1)); // the last one goes on until now
  const times = Array.from({ length: length + 1 }, (_each, at) => Math.min(0, (first + at) * sum - until));
  const starts = marks.filter(({ at, kind }) => kind === "started" && at > until - span)
    .map(({ at }) => [at - until, `The server started: ${moment(at)}`]);
  return { times, ...lists, starts, turns, computed: all, cached };
}

/** Most minutes of one answer. */
const MOST = 10_000;
const NOTHING = { from: Infinity, until: 0, minutes: [], marks: [] };

/** What the server remembers is older than this page, and the same in every browser.
 * The signal of `{from, until, minutes, marks}`: what is
 * known of the time between, in Unix seconds, oldest first. */
const activity = perKey(NOTHING);

/** Load the minutes since `from` that the page lacks. */
async function loadActivity(from, signal) {
  const now = serverTime();
  const known = activity.peek().from <= from ? activity.peek() : { ...NOTHING, from };
  let { minutes, marks } = known;
  let since = minuteOf(Math.max(from, known.until - 60));
  for (let hasMore = true; hasMore; since = minutes.at(-1)?.at + 60) {
    const answer = await call("GET", "/v1/activity", { query: { since, limit: MOST }, signal });
    const first = since;
    const isBefore = ({ at }) => at < first;
    minutes = [...minutes.filter(isBefore), ...answer.minutes];
    marks = [...marks.filter(isBefore), ...answer.marks];
    hasMore = answer.has_more;
  }
  activity.value = { from: known.from, until: now, minutes, marks };
}

/** A minute goes on until it is over: it is asked for from its beginning. */
const minuteOf = (time) => 60 * Math.floor(time / 60);
