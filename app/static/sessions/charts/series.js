// What the charts show, from the samples of memory.
import { KEPT } from "../../state/memory.js";

/** Columns for a chart: the seconds before now, then one list for each function of `reads`. A gap is null. */
export function columns(samples, reads) {
  const last = samples.at(-1)?.time ?? 0;
  return [samples.map(({ time }) => time - last), ...reads.map((read) => samples.map(read))];
}

/** The time that charts show, in seconds before now. */
export const SPAN = [-KEPT, 0];

export const used = (tier) => ({ view }) => view.data[tier].owned_bytes + view.data[tier].cached_bytes;
export const owned = (tier) => ({ view }) => view.data[tier].owned_bytes;

/** Bytes in a second that moved one way since the sample before. Null for the first, and after a restart. */
export const rate = (way) => (sample, index, samples) => {
  const before = samples[index - 1];
  const [now, then] = [sample.view.moves[way], before?.view.moves[way]];
  if (!now || !then || now.bytes < then.bytes || sample.time <= before.time) return null;
  return (now.bytes - then.bytes) / (sample.time - before.time);
};

/** The largest of some lists of numbers; 0 if there is none. */
export const peak = (...lists) => lists.reduce((most, list) => list.reduce((one, each) => Math.max(one, each ?? 0), most), 0);
