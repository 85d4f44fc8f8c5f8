// Whether the page hears from the server, and with which key.
import { batch, signal } from "@preact/signals";

/** `state` is `connecting`, `live`, `away` (it will be tried again), `key` (one is needed, or it is wrong) or `refused`
 * (the server will not tell). `message` is for people. */
export const connection = signal({ state: "connecting", message: "Connecting" });

export const AWAY = "The server is away.";
export const [FIRST_WAIT_MS, LONGEST_WAIT_MS] = [500, 5000];
export const isAway = () => connection.value.state === "away";
/** Whether an error says only that the server was away, and it is back. */
export const isPast = (error) => error?.during && connection.value.state === "live" && connection.value !== error.during;

/** What `/version` says of the server and its model; null before the first answer. */
export const server = signal(null);

export const key = signal("");
/** Counts the keys that were entered: the same one again is another try. */
export const entered = signal(0);

let reign = new AbortController();
/** A signal that is aborted when another key is entered. */
export const whileKeyed = () => reign.signal;

/** Use this key from now on. What is under way with the key before ends. */
export function enterKey(text) {
  reign.abort();
  reign = new AbortController();
  batch(() => {
    key.value = text;
    entered.value += 1;
  });
}
