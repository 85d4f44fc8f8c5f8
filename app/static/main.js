// Starts the page.
import { render } from "preact";
import { html } from "./lib/html.js";
import { App } from "./shell/app.js";
import { follow } from "./state/following.js";

render(html`<${App} />`, document.getElementById("app"));
follow();
