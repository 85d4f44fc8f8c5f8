// Icons as drawings, so that they look the same with every font.
import { html } from "../lib/html.js";

/** Lines on a ground of 16 by 16. */
const DRAWN = {
  running: "M5 3.5v9l7.5-4.5z", queued: "M3 8h.01M8 8h.01M13 8h.01", paused: "M5.5 3.5v9M10.5 3.5v9", compute: "M8 3a5 5 0 1 0 .01 0",
  ready: "M8 13V3.5M4 7.5l4-4 4 4", io_wait: "M8 2.5a5.5 5.5 0 1 0 .01 0M8 5v3.2l2.2 1.3", idle: "M4 8h8",
  ascending: "M8 13V3M4.5 6.5L8 3l3.5 3.5", descending: "M8 3v10M4.5 9.5L8 13l3.5-3.5", folded: "M6 3.5l4.5 4.5L6 12.5", open: "M3.5 6L8 10.5 12.5 6",
  close: "M4 4l8 8M12 4l-8 8", help: "M5.5 6a2.5 2.5 0 1 1 3.6 2.2c-.8.4-1.1.9-1.1 1.6M8 12.6h.01",
  system: "M2.5 3.5h11v7h-11zM6 13.5h4", light: "M8 5.5a2.5 2.5 0 1 0 .01 0M8 1.8v1.4M8 12.8v1.4M1.8 8h1.4M12.8 8h1.4M3.6 3.6l1 1M11.4 11.4l1 1M3.6 12.4l1-1M11.4 4.6l1-1",
  dark: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${DRAWN[name]} /></svg>`;
