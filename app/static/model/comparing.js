// Forks a paused session, edits the fork only, and lets both run to their ends.
import { call } from "../lib/api.js";
import { put } from "../state/sessions.js";
import { editOf, undo } from "./edits.js";
import { follow, resume } from "./turns.js";

/** Fill `desk.sides` with `{id, name, parts, done, error}` for the session as it is and for its edited fork. Each part
 * is `{text, tokenIds}`. Throws if there is no fork, or no such edit; then there is no fork either. */
export async function compare(desk) {
  if (desk.preview.peek()) await undo(desk);
  const before = desk.turn.peek().text;
  const fork = await call("POST", `/v1/sessions/${desk.id}/fork`);
  try {
    await call("POST", `/v1/sessions/${fork.id}/checkpoint/edit`, { body: { edits: [editOf(desk.edit.peek())] } });
  } catch (error) {
    await call("DELETE", `/v1/sessions/${fork.id}`);
    throw error;
  }
  put(fork);
  desk.sides.value = [side(desk.id, "As it is", before), side(fork.id, "With the edit", before)];
  await Promise.all([runHere(desk), runFork(desk, fork.id)]);
}

const side = (id, name, before) => ({ id, name, before, parts: [], done: false, error: null });

function change(desk, at, changed) {
  desk.sides.value = desk.sides.peek().map((each, index) => (index === at ? { ...each, ...changed(each) } : each));
}

const adding = (desk, at) => (text, tokenIds) =>
  change(desk, at, ({ parts }) => ({ parts: [...parts, { text, tokenIds }] }));

async function runHere(desk) {
  await resume(desk, "end", adding(desk, 0));
  change(desk, 0, () => ({ done: true, error: desk.turn.peek().error }));
}

async function runFork(desk, id) {
  let error = null;
  await follow(`/v1/sessions/${id}/resume`, { until: "end" }, adding(desk, 1)).catch((thrown) => (error = thrown));
  change(desk, 1, () => ({ done: true, error }));
}

/** Index of the first part in which the tokens of `parts` are not those of `others`; -1 if there is none. */
export function firstDifference(parts, others) {
  const mine = parts.flatMap(({ tokenIds }) => tokenIds);
  const theirs = others.flatMap(({ tokenIds }) => tokenIds);
  const differs = mine.findIndex((tokenId, at) => tokenId !== theirs[at]);
  let count = 0;
  return differs < 0 ? -1 : parts.findIndex(({ tokenIds }) => (count += tokenIds.length) > differs);
}
