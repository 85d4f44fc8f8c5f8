// What the server did by the minute, as it remembers: older than this page, and the same in every browser.
import { call } from "../lib/api.js";
import { serverTime } from "../lib/clock.js";
import { perKey } from "./per_key.js";

/** Most minutes of one answer. */
const MOST = 10_000;
const NOTHING = { from: Infinity, until: 0, minutes: [], marks: [] };

/** The signal of `{from, until, minutes, marks}`: what is known of the time between, in Unix seconds, oldest first. */
export const activity = perKey(NOTHING);

/** Ask for what is not known of the time since `from`. */
export async function loadActivity(from, signal) {
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
