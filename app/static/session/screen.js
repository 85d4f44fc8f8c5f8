// The screen of session.
import { html } from "../lib/html.js";

export const SessionScreen = () => html`<h1>Session</h1>`;
