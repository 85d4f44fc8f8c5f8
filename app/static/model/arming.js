// Breakpoints of a session: which layer has which, and arming and removing them.
import { call, erase } from "../lib/api.js";
import { AFTER } from "../state/points.js";

/** How long a pause may last. People read for longer than programs do. */
const PAUSE_S = 3600;

/** `{pauses, captures, edits}` in and after a layer: the breakpoints of each action. */
export function marksOf(breakpoints, layer) {
  const here = (breakpoints ?? []).filter((each) => each.layers.includes(layer));
  const of = (action) => here.filter((each) => each.action === action);
  return { pauses: of("pause"), captures: of("capture"), edits: of("edit") };
}

/** The breakpoint that captures all layers at all positions, or undefined. Programs arm others, which stay theirs. */
export const watchOf = (breakpoints, numLayers) => (breakpoints ?? []).find((each) => isWatch(each, numLayers));

const isWatch = ({ action, point, layers, once, when }, numLayers) =>
  action === "capture" && point === AFTER && !once && layers.length === numLayers && when.pass === "any" &&
  [when.position, when.token_id, when.every].every((each) => each === null);

/** Arm a pause at a point of a layer, or remove those that are there. With a pause comes a watch, so that there is something to
 * see. */
export const togglePause = (desk, layer, how, numLayers) => inTurn(desk, () => pauseOrNot(desk, layer, how, numLayers));

async function pauseOrNot(desk, layer, how, numLayers) {
  const isWanted = !marksOf(desk.breakpoints.peek(), layer).pauses.length; // by who sees what is shown
  const found = await armed(desk);
  const { pauses } = marksOf(found, layer);
  if (!isWanted) return removeAll(desk, pauses);
  if (!watchOf(found, numLayers)) desk.ownWatch = (await call(...watching(desk, numLayers))).id;
  if (!pauses.length) await call(...pausing(desk, layer, how));
}

/** The call that arms a pause. */
export const pausing = (desk, layer, { once, pass, point = AFTER }) =>
  arming(desk, { layer, point, action: "pause", when: { pass }, once, timeout_s: PAUSE_S });

/** The call that captures all layers. */
export const watching = (desk, numLayers) => arming(desk, { layers: [...Array(numLayers).keys()], action: "capture" });

/** The call that captures what stands at a point of a layer. */
export const capturing = (desk, { layer, point }) => arming(desk, { layer, point, action: "capture" });

/** The call that makes an edit at a point of a layer in every pass from now on. */
export const steering = (desk, { layer, point }, edit) => arming(desk, { layer, point, action: "edit", edits: [edit] });

/** Capture all layers until this is called again, or no more. */
export const toggleWatch = (desk, numLayers) =>
  inTurn(desk, async () => {
    const shown = watchOf(desk.breakpoints.peek(), numLayers);
    if (shown) await removeAll(desk, [shown]);
    else if (!watchOf(await armed(desk), numLayers)) await call(...watching(desk, numLayers));
  });

/** Send one of those calls. */
export const arm = (desk, asked) => inTurn(desk, () => call(...asked));

/** Remove these breakpoints. */
export const disarm = (desk, gone) => inTurn(desk, () => removeAll(desk, gone));

/** Show what is armed now: others arm and remove too, and those for once go. */
export const refresh = (desk) => inTurn(desk, () => {});

/** One change after the other: each begins from what the last has left. Whatever becomes of it, the truth is shown. */
function inTurn(desk, change) {
  const done = desk.armed.then(change).finally(() => show(desk));
  desk.armed = done.catch(() => {}); // who asked for it is told
  return done;
}

/** A watch that came with a pause goes with the turn that has no more pauses. */
async function show(desk) {
  const found = await armed(desk);
  const isOver = desk.session.peek()?.state === "idle" && !found.some((each) => each.action === "pause");
  const spent = isOver ? found.find((each) => each.id === desk.ownWatch) : undefined;
  if (spent) await removeAll(desk, [spent]);
  desk.breakpoints.value = found.filter((each) => each !== spent);
}

const pathOf = (desk) => `/v1/sessions/${desk.id}/breakpoints`;
const armed = async (desk) => (await call("GET", pathOf(desk))).data;
const arming = (desk, body) => ["POST", pathOf(desk), { body }];

async function removeAll(desk, gone) {
  for (const { id } of gone) await erase(`${pathOf(desk)}/${id}`);
}

/** Forget what was captured. */
export async function clearCaptures(desk) {
  await call("DELETE", `/v1/sessions/${desk.id}/captures`);
  desk.lens.forget();
}
