// The time, for texts that tell how long ago something was. It is the server's, whatever this machine's clock says.
import { signal } from "@preact/signals";

const TICKS = 5;
/** Seconds by which the time in a header may be late. */
const LATE_S = 3;
/** Seconds that the server's clock is ahead of this machine's, at least; null before the server has told a time. */
let ahead = null;

/** Unix seconds on the server. */
export const serverTime = () => Date.now() / 1000 + (ahead ?? 0);

/** The server has told its time, in Unix seconds, a moment ago: the more it has told, the nearer is the guess. */
export function hearTime(time) {
  const least = time - Date.now() / 1000;
  if (Number.isFinite(least) && (ahead === null || least > ahead)) ahead = least;
}

/** The same with the time of an answer's header, which is coarse. If it denies the guess, a clock has been set. */
export function hearHeader(date) {
  const time = Date.parse(date) / 1000;
  if (ahead > time + LATE_S - Date.now() / 1000) ahead = null;
  hearTime(time);
  second.value = now.value = serverTime();
}

/** A time of day, to the second; of another day its date and the minute. */
export function moment(time) {
  const [date, today] = [new Date(time * 1000), new Date(serverTime() * 1000)];
  if (date.toDateString() === today.toDateString()) return date.toLocaleTimeString("en-GB");
  return date.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

/** Unix seconds, each second anew. */
export const second = signal(serverTime());
/** Unix seconds, every few seconds anew: for those of which there are many. */
export const now = signal(second.value);
let ticks = 0;
setInterval(() => {
  second.value = serverTime();
  if ((ticks += 1) % TICKS === 0) now.value = second.value;
}, 1000);
