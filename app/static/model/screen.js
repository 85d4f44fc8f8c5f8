// The screen of model.
import { html } from "../lib/html.js";

export const ModelScreen = () => html`<h1>Model</h1>`;
