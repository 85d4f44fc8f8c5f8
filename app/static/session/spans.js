// Makes the lanes of a timeline from what has happened to a session.

/** `{state, phase, tier, turns, pauses}`. The first three are spans `{from, to, value, bytes}`, one after the other; times
 * are Unix seconds, and the last span of each ends `now`. A turn is `{from, to, status, reason, usage, waits}`: `to` is
 * null while it runs, `waits` is the session's `resume_ms`. A pause is `{time, layer}`. */
export function lanesOf(happenings, now) {
  const lanes = { state: [], phase: [], tier: [], turns: [], pauses: [] };
  for (const happening of happenings) TAKE[happening.name]?.(lanes, happening);
  for (const lane of [lanes.state, lanes.phase, lanes.tier]) if (lane.length) lane.at(-1).to = now;
  return lanes;
}

const TAKE = {
  session({ state, phase, tier, turns }, { time, data: { session } }) {
    extend(state, time, session.state);
    extend(phase, time, session.phase);
    extend(tier, time, session.kv.tier ?? "none", session.kv);
    const last = turns.at(-1);
    if (last && last.to !== null && last.waits === null) last.waits = session.usage.resume_ms;
  },
  turn({ turns }, { time, data }) {
    if (data.status === "begun") {
      turns.push({ from: time, to: null, status: "running", reason: null, usage: null, waits: null });
      return;
    }
    const last = turns.at(-1);
    if (last?.to !== null) return; // it had begun before anybody looked
    Object.assign(last, { to: time, status: data.status, reason: data.finish_reason ?? data.code, usage: data.usage });
  },
  pause({ pauses }, { time, data }) {
    pauses.push({ time, layer: data.checkpoint.layer });
  },
};

function extend(lane, time, value, kv = null) {
  const last = lane.at(-1);
  if (last) last.to = time;
  if (last?.value === value) last.kv = kv;
  else lane.push({ from: time, to: time, value, kv });
}
