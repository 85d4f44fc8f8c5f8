// Breakpoints of a session: which layer has which, and arming and removing them.
import { call } from "../lib/api.js";

/** How long a pause may last. People read for longer than programs do. */
const PAUSE_S = 3600;

/** `{pauses, captures, edits}` after a layer: the breakpoints of each action. */
export function marksOf(breakpoints, layer) {
  const here = (breakpoints ?? []).filter((each) => each.layers.includes(layer));
  const of = (action) => here.filter((each) => each.action === action);
  return { pauses: of("pause"), captures: of("capture"), edits: of("edit") };
}

/** Whether some breakpoint captures. */
export const isWatched = (breakpoints) => (breakpoints ?? []).some((each) => each.action === "capture");

/** Arm a pause after a layer, or remove those that are there. The first pause makes the server capture all layers that
 * the turn gets to, so that there is something to see; the last one takes that away, unless the turn is at it. */
export const togglePause = (desk, layer, how, numLayers) => inTurn(desk, () => pauseOrNot(desk, layer, how, numLayers));

async function pauseOrNot(desk, layer, { once, pass }, numLayers) {
  const breakpoints = desk.breakpoints.peek();
  const { pauses } = marksOf(breakpoints, layer);
  if (pauses.length) {
    for (const { id } of pauses) await remove(desk, id);
    const others = breakpoints.filter((each) => each.action === "pause" && !pauses.includes(each));
    if (!others.length && !desk.session.peek().checkpoint) await unwatch(desk);
  } else {
    if (!isWatched(breakpoints)) await watch(desk, numLayers);
    await arm(desk, { layer, action: "pause", when: { pass }, once, timeout_s: PAUSE_S });
  }
  await desk.refreshBreakpoints();
}

/** Capture all layers, or no more. */
export const toggleWatch = (desk, numLayers) =>
  inTurn(desk, async () => {
    if (isWatched(desk.breakpoints.peek())) await unwatch(desk);
    else await watch(desk, numLayers);
    await desk.refreshBreakpoints();
  });

/** One change after the other: each begins from what the last has left. */
function inTurn(desk, change) {
  const done = desk.armed.then(change);
  desk.armed = done.catch(() => {}); // who asked for it is told
  return done;
}

/** Arm one breakpoint. `body` is that of `createBreakpoint`. */
export const arm = (desk, body) => call("POST", `/v1/sessions/${desk.id}/breakpoints`, { body });

/** Remove one breakpoint. */
const remove = (desk, id) => call("DELETE", `/v1/sessions/${desk.id}/breakpoints/${id}`);

const watch = (desk, numLayers) => arm(desk, { layers: [...Array(numLayers).keys()], action: "capture" });

async function unwatch(desk) {
  for (const each of desk.breakpoints.peek()) if (each.action === "capture") await remove(desk, each.id);
}

/** Forget what was captured. */
export async function clearCaptures(desk) {
  await call("DELETE", `/v1/sessions/${desk.id}/captures`);
  desk.lens.forget();
}
