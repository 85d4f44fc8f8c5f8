// Whether the page hears from the server, and with which key.
import { signal } from "@preact/signals";

/** `state` is `connecting`, `live`, `away` (it will be tried again), `key` (one is needed, or it is wrong) or `refused`
 * (the server will not tell). `message` is for people. */
export const connection = signal({ state: "connecting", message: "Connecting" });

/** What `/version` says of the server and its model; null before the first answer. */
export const server = signal(null);

export const key = signal("");
