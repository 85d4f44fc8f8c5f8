// Edits of the checkpoint: from the form to the API's body, tried and taken back.
import { call, download, need, scratch, upload } from "../lib/api.js";
import { server } from "../state/connection.js";
import { AFTER, partOf, pointIn, STREAM } from "../state/points.js";
import { isVector } from "./vectors.js";

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
  op: "scale", factor: "0.9", vector: "", positions: "last", first: "", end: "", max_norm: "", part: "",
};

/** The API's form of an edit at a point of a layer. What is no number goes as it is: the server says what is wrong with it. Throws `ApiError`
 * where a field is empty. */
export function editOf({ op, factor, vector, positions, first, end, max_norm, part }, { layer, point }) {
  const takes = OPS[op].takes;
  const kind = partOf(pointIn(layer, point));
  return {
    op,
    ...(kind && part.trim() !== "" && { [kind]: part.split(/[\s,]+/).filter(Boolean).map((each) => numberOf(each)) }),
    ...(takes.includes("factor") && { factor: numberOf(factor, FACTOR) }),
    ...(takes.includes("vector") && vector !== "" && { vector }),
    positions: positions === "range" ? [numberOf(first, RANGE), numberOf(end, RANGE)] : positions,
    ...(max_norm.trim() !== "" && { max_norm: numberOf(max_norm) }),
  };
}

const FACTOR = { param: "factor", message: "factor: enter a number" };
const RANGE = { param: "positions", message: "positions: enter the first one, and the one after the last" };

/** Why there is no edit to make yet, or null: one along a vector needs a vector that is still there. */
export const noVector = ({ op, vector }) =>
  OPS[op].takes.includes("vector") && !isVector(vector) ? "Choose a vector first: “Steering” makes one from two prompts." : null;

export function numberOf(text, empty) {
  need(text.trim(), empty);
  return Number.isFinite(Number(text)) ? Number(text) : text;
}

const sessionOf = (desk) => `/v1/sessions/${desk.id}`;
const pathOf = (desk) => `${sessionOf(desk)}/checkpoint`;

/** Make the form's edit at the checkpoint as it was at first, and look through the lens before and after. `preview` of
 * the desk is then `{place, op, original, position, before, after, isMade, ends}`, or null while nothing is edited.
 * `before` and `after` are null where no lens can be had; `isMade` says that the edit is known to be made. `ends` are the lenses after the last layer, without and with the edit,
 * each null where it cannot be had; it is missing until they come. */
export const tryEdit = (desk) => atPause(desk, async (checkpoint) => {
  const [place, edit] = [desk.place.peek(), editOf(desk.edit.peek(), checkpoint)];
  const position = positionOf(desk, checkpoint, edit);
  const known = desk.preview.peek();
  const original = known?.original ?? (await download("GET", `${pathOf(desk)}/activation`));
  if (known) await putBack(desk, original);
  let preview = null;
  let plain = null;
  try {
    const before = await lensAt(sessionOf(desk), position, checkpoint.point);
    plain = known?.position === position && known.ends ? known.ends[0] : await endOf(desk, checkpoint, position);
    preview = { place, op: edit.op, original, position, before, after: null };
    await make(desk, edit, () => (preview = null));
    preview = { ...preview, after: await lensAt(sessionOf(desk), position, checkpoint.point), isMade: true };
  } finally {
    show(desk, place, preview);
  }
  const ends = [plain, await endOf(desk, checkpoint, position)];
  if (desk.preview.peek() === preview) desk.preview.value = { ...preview, ends };
});

/** Put back what was there before the edit, if there was one. */
export const undo = (desk) => atPause(desk, async () => {
  const place = desk.place.peek();
  if (desk.preview.peek() === null) return;
  await putBack(desk, desk.preview.peek().original);
  show(desk, place, null);
});

/** Run what needs the pause, which may be over before the page hears of it. */
async function atPause(desk, run) {
  const checkpoint = desk.session.peek()?.checkpoint;
  if (!checkpoint) throw new Error(WENT_ON);
  try {
    return await run(checkpoint);
  } catch (error) {
    throw error.status === 409 ? new Error(WENT_ON) : error;
  }
}

const WENT_ON = "The turn went on before this could be done.";

/** The call that makes an edit at the checkpoint of the session at a path. */
export const editing = (path, edit) => ["POST", `${path}/checkpoint/edit`, { body: { edits: [edit] } }];

/** Make an edit. `refused` is called if none was made. */
async function make(desk, edit, refused) {
  try {
    await call(...editing(sessionOf(desk), edit));
  } catch (error) {
    if (error.status >= 400 && error.status < 500) refused();
    throw error;
  }
}

const putBack = (desk, original) => upload("PUT", `${pathOf(desk)}/activation`, original);

/** Show it, unless the turn has gone on meanwhile. News from before the pause may say that it still runs. */
function show(desk, place, preview) {
  if ([place, "busy"].includes(desk.place.peek())) desk.preview.value = preview;
}

/** The chosen cell's position if the paused pass has it, or else its last one: an edit there changes no other. */
function positionOf(desk, { first, end }, { positions }) {
  const chosen = desk.cell.peek()?.position ?? end - 1;
  return positions !== "last" && chosen >= first && chosen < end ? chosen : end - 1;
}

/** Null where the pass does not stand in the residual stream. */
async function lensAt(session, position, point) {
  if (!STREAM.includes(point)) return null;
  const query = { positions: `${position}:${position + 1}`, top_k: 8 };
  return (await call("GET", `${session}/checkpoint/lens`, { query })).positions[0];
}

/** What would really be said: the lens after the last layer, to which a fork runs on. Null where that cannot be had. */
async function endOf(desk, checkpoint, position) {
  const last = server.peek().num_layers - 1;
  const isThere = ({ layer, point }) => layer === last && point === AFTER;
  if (isThere(checkpoint)) return lensAt(sessionOf(desk), position, AFTER);
  return scratch("edit", async (fork) => {
    const body = { until: { layer: last } };
    // Breakpoints on the way pause the fork too.
    for (let at = checkpoint; !isThere(at); ) at = (await call("POST", `${fork}/resume`, { body })).checkpoint;
    return lensAt(fork, position, AFTER);
  }, sessionOf(desk)).catch(() => null);
}
