// The API key. It is kept in memory only: a page that is loaded again asks for it again.
import { signal } from "@preact/signals";

export const key = signal("");
