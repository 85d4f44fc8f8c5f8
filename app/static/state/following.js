// Follows the live stream, and comes back to it where it ended.
import { batch, effect, untracked } from "@preact/signals";
import { ApiError, call, stream } from "../lib/api.js";
import { connection, key, server } from "./connection.js";
import { note } from "./happenings.js";
import { forgetMemory, takeMemory } from "./memory.js";
import { forgetAll, put, remove, replaceAll } from "./sessions.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;
/** The server tells of memory each second. A connection that is silent for so long has ended without a word. */
const SILENT_MS = 15_000;

/** Follow for as long as the page is open; begin anew with each other key. */
export function follow() {
  let running = new AbortController();
  effect(() => {
    void key.value;
    running.abort();
    running = new AbortController();
    untracked(() => batch(() => (forgetAll(), forgetMemory())));
    keepFollowing(running.signal);
  });
}

async function keepFollowing(signal) {
  const place = { lastId: null, parts: [] };
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      await followOnce(place, signal, () => (wait = FIRST_WAIT_MS));
      tell("away", "The server has ended the stream. Trying again");
    } catch (error) {
      if (signal.aborted || isFinal(error)) return;
    }
    await pause(wait, signal);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

async function followOnce(place, signal, onOpen) {
  server.value = await call("GET", "/version", { signal });
  place.parts = [];
  const watch = watching(signal);
  await stream("GET", "/v1/events", {
    signal: watch.signal,
    headers: place.lastId === null ? {} : { "Last-Event-ID": place.lastId },
    onOpen: () => {
      onOpen();
      tell("live", "Live");
    },
    onEvent: (event) => {
      watch.heard();
      take(event, place);
    },
  }).finally(watch.stop);
}

/** A signal that is aborted with `signal`, or when `heard` has not been called for long. */
function watching(signal) {
  const watch = new AbortController();
  const end = () => watch.abort();
  let timer = setTimeout(end, SILENT_MS);
  signal.addEventListener("abort", end);
  return {
    signal: watch.signal,
    heard: () => {
      clearTimeout(timer);
      timer = setTimeout(end, SILENT_MS);
    },
    stop: () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
    },
  };
}

function take({ name, id, data }, place) {
  batch(() => {
    if (name === "snapshot") takeSnapshot(data, place);
    else if (name === "session") takeSession(data);
    else if (name === "memory") takeMemory(data);
    else note(data.session_id, name, data);
  });
  if (id !== null) place.lastId = id;
}

function takeSnapshot({ sessions, has_more }, place) {
  place.parts.push(...sessions);
  if (has_more) return;
  replaceAll(place.parts);
  for (const session of place.parts) note(session.id, "session", { change: "seen", session });
  place.parts = [];
}

function takeSession({ change, session }) {
  if (change === "closed") return remove(session.id);
  put(session);
  note(session.id, "session", { change, session });
}

/** Whether there is no use in trying again. */
function isFinal(error) {
  if (error instanceof ApiError && error.status === 401) {
    tell("key", key.value ? "The server does not know this key." : "This server wants a key.");
    return true;
  }
  if (error instanceof ApiError && error.status === 403) {
    tell("refused", error.message);
    return true;
  }
  tell("away", error instanceof ApiError && error.status ? error.message : "The server is away. Trying again");
  return false;
}

const tell = (state, message) => (connection.value = { state, message });

const pause = (milliseconds, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
