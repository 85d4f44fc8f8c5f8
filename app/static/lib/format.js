// Numbers as people read them, always with units.
import { second } from "./clock.js";

const ENGLISH = new Intl.NumberFormat("en-US");
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** 1536 is "1.5 KiB". */
export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < BYTES.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count < 10 && unit > 0 ? count.toFixed(1) : Math.round(count)} ${BYTES[unit]}`;
}

/** 0.25 is "250 ms", 90 is "1 min 30 s", 180000 is "2 d 2 h". */
export function seconds(count) {
  if (count === 0) return "0 s";
  if (count < 0.001) return `${(count * 1e6).toFixed(0)} µs`;
  if (count < 1) return `${(count * 1000).toFixed(count < 0.01 ? 1 : 0)} ms`;
  if (count < 60) return `${count.toFixed(count < 10 ? 1 : 0)} s`;
  if (count < 3600) return `${Math.floor(count / 60)} min ${Math.floor(count % 60)} s`;
  if (count < 48 * 3600) return `${Math.floor(count / 3600)} h ${Math.floor((count % 3600) / 60)} min`;
  return `${Math.floor(count / 86400)} d ${Math.floor((count % 86400) / 3600)} h`;
}

/** 200 is "3 min": what is enough of a long time. */
export function coarse(count) {
  const [size, unit] = [[86400, "days"], [3600, "h"], [60, "min"]].find(([each]) => count >= 2 * each) ?? [1, "s"];
  return `${Math.round(Math.max(0, count) / size)} ${unit}`;
}

export const milliseconds = (count) => seconds(count / 1000);

/** How long it is until a Unix time in seconds, in whole seconds: at least one. */
export const until = (time) => seconds(Math.max(1, Math.floor(time - second.value)));

/** The positions of a checkpoint. */
export const positions = ({ first, end }) =>
  end - first === 1 ? `position ${number(first)}` : `positions ${number(first)} to ${number(end - 1)}`;

const PLACES = {
  device: "on the device", host: "in host memory", disk: "on disk",
  to_host: "moves to the host", to_disk: "moves to the disk", to_device: "moves to the device",
};

/** Where KV is, of a session's `kv`. */
export const place = ({ tier }) => (tier === null ? "nowhere" : PLACES[tier]);

/** What a turn's first token waited for: `usage.resume_ms` of a session. */
export const waits = ({ queue, restore, prefill }) =>
  `queue ${milliseconds(queue)}, restore ${milliseconds(restore)}, prefill ${milliseconds(prefill)}`;

/** 1184 is "1.18K", for places without room. */
export const short = (value) => SHORT.format(value);

/** 12345 is "12,345". */
export const number = (count) => ENGLISH.format(count);

/** "3 tokens", "1 token". */
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** 0.125 is "12.5 %". */
export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** How long ago a Unix time in seconds was. */
export const ago = (time) => `${seconds(Math.max(0, second.value - time))} ago`;

/** The part of an id by which people tell sessions apart. Ids begin with the time, so those of one moment look alike. */
export const shortId = (id) => id.slice(-8);

/** What a session's client calls it, else its id. A fork has what its origin has, so it is told apart. */
export function nameOf({ id, metadata, forked_from: from }) {
  const name = metadata.name || Object.values(metadata)[0];
  return name && from ? `${name}, fork ${shortId(id)}` : name || shortId(id);
}
