// Follows the live stream, and comes back to it where it ended.
import { batch, effect, untracked } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { hearHeader, hearTime } from "../lib/clock.js";
import { connection, entered, FIRST_WAIT_MS, key, LONGEST_WAIT_MS, server, whileKeyed } from "./connection.js";
import { note } from "./happenings.js";
import { findings, takeMemory, takeTurn } from "./memory.js";
import { say } from "./notices.js";
import { forgetEverything } from "./per_key.js";
import { grow, put, remove, replaceAll, running, sessionOf } from "./sessions.js";
import { settle } from "./turns.js";

/** The server tells of memory each second. A connection that is silent for so long has ended without a word. */
const SILENT_MS = 15_000;
/** Short: the header shows the model beside it. */
const GONE = "Server away, trying again";

/** Follow for as long as the page is open; begin anew with each key that is entered. */
export function follow() {
  effect(() => {
    void entered.value;
    untracked(begin);
  });
}

function begin() {
  forgetEverything();
  if (connection.value.state === "key") tell("key", "Asking the server"); // the form stays, and the keys in it
  else tell("connecting", "Connecting");
  keepFollowing(whileKeyed());
}

async function keepFollowing(signal) {
  const place = { lastId: null, parts: [] };
  let wait = FIRST_WAIT_MS;
  while (await isLookedAt(signal)) {
    let asked = 0;
    try {
      await followOnce(place, signal, () => (wait = FIRST_WAIT_MS));
      tell("away", GONE);
    } catch (error) {
      if (isHidden() && error.name === "AbortError") continue;
      if (signal.aborted || isFinal(error)) return;
      asked = 1000 * (error.retryAfter ?? 0);
    }
    await pause(Math.max(wait, asked), signal);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

const isHidden = () => document.visibilityState === "hidden";

/** True as soon as somebody can see the page, false if `signal` is aborted first. A browser has six connections to a
 * server for all of its tabs: a hidden tab must not keep one. */
function isLookedAt(signal) {
  return new Promise((resolve) => {
    const look = () => {
      if (isHidden() && !signal.aborted) return;
      document.removeEventListener("visibilitychange", look);
      signal.removeEventListener("abort", look);
      resolve(!signal.aborted);
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener("abort", look);
    look();
  });
}

async function followOnce(place, signal, onOpen) {
  const watch = watching(signal);
  try {
    server.value = await call("GET", "/version", { signal: watch.signal });
    place.parts = [];
    await stream("GET", "/v1/events", {
      signal: watch.signal,
      headers: place.lastId === null ? {} : { "Last-Event-ID": place.lastId },
      onOpen: (answer) => {
        hearHeader(answer.headers.get("Date"));
        onOpen();
        tell("live", "Live");
      },
      onEvent: (event) => {
        watch.heard();
        takeWell(event, place);
      },
    });
  } finally {
    watch.stop();
  }
}

/** A signal that is aborted with `signal`, when the page is hidden, or when `heard` has not been called for long. */
function watching(signal) {
  const watch = new AbortController();
  const end = () => watch.abort();
  let timer = setTimeout(end, SILENT_MS);
  const hide = () => isHidden() && end();
  document.addEventListener("visibilitychange", hide);
  return {
    signal: AbortSignal.any([signal, watch.signal]),
    heard: () => {
      clearTimeout(timer);
      timer = setTimeout(end, SILENT_MS);
    },
    stop: () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", hide);
    },
  };
}

/** Take an event. What goes wrong in it is the page's own fault: another connection would not mend it. */
function takeWell(event, place) {
  try {
    batch(() => take(event, place));
  } catch (fault) {
    console.error(fault);
    say(`This page has a fault, and may show what is not so: ${fault.message}`, "error");
  }
  if (event.id !== null) place.lastId = event.id;
}

function take({ name, data }, place) {
  if (data.time) hearTime(data.time);
  if (name === "snapshot") takeSnapshot(data, place);
  else if (name === "session") takeSession(data);
  else if (name === "memory") takeMemory(data, running());
  else if (name === "findings") findings.value = data;
  else if (name === "tokens") grow(data.tokens);
  else {
    if (name === "turn") takeTurn(data);
    note(data.session_id, name, data);
  }
}

function takeSnapshot({ time, sessions, has_more }, place) {
  place.parts.push(...sessions);
  if (has_more) return;
  place.parts.forEach(settle);
  replaceAll(place.parts);
  for (const session of place.parts) note(session.id, "session", { time, change: "seen", session });
  place.parts = [];
}

function takeSession(news) {
  const { change, session } = news;
  if (change === "closed") return remove(session.id);
  if (sessionOf(session.id).peek()?.checkpoint?.created_at > news.time) return; // it is from before the pause that is known
  put(session);
  note(session.id, "session", news);
}

/** Whether there is no use in trying again. */
function isFinal(error) {
  const status = error instanceof ApiError && error.status;
  if (status === 401) tell("key", key.value ? "The server does not know this key." : "This server wants a key.");
  else if (status === 403) tell("refused", error.message);
  else tell("away", status ? error.message : GONE);
  return status === 401 || status === 403;
}

const tell = (state, message) => (connection.value = { state, message });

const pause = (milliseconds, signal) =>
  new Promise((resolve) => AbortSignal.any([signal, AbortSignal.timeout(milliseconds)]).addEventListener("abort", resolve));
