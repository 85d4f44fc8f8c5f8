// What a row's buttons do, and why they may not.
import { signal } from "@preact/signals";
import { call } from "../../lib/api.js";
import { remove } from "../../state/sessions.js";

/** Errors by id of the session that a button did not get through to. */
export const refusals = signal({});
/** The session that is about to be closed, if it is confirmed; null: none. */
export const closing = signal(null);

/** Why the phase of a session may not be set; null: it may. */
export function whyNoPhase({ state }) {
  if (state === "queued" || state === "running") return `A turn is ${state}: the phase can be set when it is over.`;
  return null;
}

export const whyNoPark = (view) =>
  whyNoPhase(view) ?? (view.phase === "io_wait" || view.phase === "idle" ? "It is parked already." : null);
export const whyNoCall = (view) =>
  whyNoPhase(view) ?? (view.phase === "ready" || view.phase === "compute" ? "It is at hand already." : null);

export const park = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "io_wait" } }));
export const callBack = (id) => tell(id, () => call("POST", `/v1/sessions/${id}/phase`, { body: { phase: "ready" } }));

/** Close it for good. */
export async function close(id) {
  await call("DELETE", `/v1/sessions/${id}`);
  remove(id);
}

export function forgive(id) {
  const { [id]: _gone, ...rest } = refusals.value;
  refusals.value = rest;
}

async function tell(id, action) {
  forgive(id);
  try {
    await action();
  } catch (error) {
    const message = error.status === 404 ? "It is closed, or another tenant's: an operator may only close it." : error.message;
    refusals.value = { ...refusals.value, [id]: message };
  }
}
