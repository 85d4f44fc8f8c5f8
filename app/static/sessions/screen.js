// The screen of sessions.
import { html } from "../lib/html.js";

export const SessionsScreen = () => html`<h1>Sessions</h1>`;
