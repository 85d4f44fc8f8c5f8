// Edits of the checkpoint: from the form to the API's body, tried and taken back.
import { call, download, upload } from "../lib/api.js";

/** Each operation: what it does, which fields it takes, and the slider's range and first value. */
export const OPS = {
  scale: { does: "factor × h", takes: ["factor"], slider: [0, 2, 0.05], first: "0.9" },
  add: { does: "h + factor × v", takes: ["vector", "factor"], slider: [-8, 8, 0.1], first: "1" },
  replace: { does: "v", takes: ["vector"] },
  project_out: { does: "h without its part along v", takes: ["vector"] },
  clamp: { does: "h, along v set to factor", takes: ["vector", "factor"], slider: [-50, 50, 0.5], first: "0" },
  ablate: { does: "0", takes: [] },
};
export const FIRST_EDIT = {
  op: "scale", factor: "0.9", vector: "", positions: "last", first: "", end: "", max_norm: "",
};

/** The API's form of an edit. What is no number is left for the server to refuse. */
export function editOf({ op, factor, vector, positions, first, end, max_norm }) {
  const takes = OPS[op].takes;
  return {
    op,
    ...(takes.includes("factor") && { factor: numberOf(factor) }),
    ...(takes.includes("vector") && vector !== "" && { vector }),
    positions: positions === "range" ? [numberOf(first), numberOf(end)] : positions,
    ...(max_norm.trim() !== "" && { max_norm: Number(max_norm) }),
  };
}

/** Why there is no edit to make yet, or null: one along a vector needs a vector. */
export const noVector = ({ op, vector }) =>
  OPS[op].takes.includes("vector") && vector === "" ? "Choose a vector first, or make one from two prompts." : null;

const numberOf = (text) => (text.trim() === "" ? null : Number(text));
const pathOf = (desk) => `/v1/sessions/${desk.id}/checkpoint`;

/** Make the form's edit at the checkpoint as it was at first, and look through the lens before and after. */
export async function tryEdit(desk) {
  const known = desk.preview.peek();
  const position = positionOf(desk);
  const original = known?.original ?? (await download(`${pathOf(desk)}/activation`)).bytes;
  if (known) await putBack(desk, original);
  let preview = null;
  try {
    const before = await lensAt(desk, position);
    await call("POST", `${pathOf(desk)}/edit`, { body: { edits: [editOf(desk.edit.peek())] } });
    preview = { original, position, before, after: await lensAt(desk, position) };
  } finally {
    show(desk, preview);
  }
}

/** Put back what was there before the edit, if there was one. */
export async function undo(desk) {
  if (desk.preview.peek() === null) return;
  await putBack(desk, desk.preview.peek().original);
  show(desk, null);
}

const putBack = (desk, original) => upload("PUT", `${pathOf(desk)}/activation`, original);

/** The map shows the checkpoint as it is now. */
function show(desk, preview) {
  const checkpoint = desk.session.peek()?.checkpoint;
  if (!checkpoint) return; // the turn has gone on meanwhile
  desk.preview.value = preview;
  desk.lens.forget(checkpoint.layer);
}

/** The chosen cell's position if the paused pass has it, or else its last one. */
function positionOf(desk) {
  const { first, end } = desk.session.peek().checkpoint;
  const chosen = desk.cell.peek()?.position ?? end - 1;
  return chosen >= first && chosen < end ? chosen : end - 1;
}

async function lensAt(desk, position) {
  const query = { positions: `${position}:${position + 1}`, top_k: 8 };
  return (await call("GET", `${pathOf(desk)}/lens`, { query })).positions[0];
}
