// One click to something worth seeing: a question whose turn stands where the model is about to know the answer.
import { call } from "../lib/api.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { go, linkTo } from "../state/route.js";
import { add } from "../state/sessions.js";
import { generate } from "../state/turns.js";
import { marksOf, togglePause } from "./arming.js";
import { deskOf } from "./desk.js";

const QUESTION = "The Eiffel Tower stands in the city of";
/** How far up the layers the turn stops: most models know by then what they will say. */
const FAR = 0.9;

/** For a session without a history: ask, pause, and choose the cell of the answer. */
export const TryIt = ({ desk, why }) => html`
  <${Button} why=${why} onClick=${() => attempt("Try", () => ask(desk))} title="It is paused near the last layer, so that you see the answer come">
    Try: “${QUESTION}”
  <//>
`;

/** The same in a session of its own. */
export const LookInside = () => html`<${Button} onClick=${() => attempt("Look inside", open)}>Look inside the model<//>`;

async function open() {
  const view = await call("POST", "/v1/sessions", { body: { metadata: { name: "inside the model" } } });
  add(view);
  go(linkTo(view.id, "model"));
  await ask(deskOf(view.id));
}

async function ask(desk) {
  const layers = server.peek().num_layers;
  const layer = Math.floor(FAR * (layers - 1));
  if (!marksOf(desk.breakpoints.peek(), layer).pauses.length) await togglePause(desk, layer, { once: true, pass: "any" }, layers);
  await generate(desk.id, { prompt: QUESTION, max_tokens: 8, temperature: 0 }, QUESTION);
  const { checkpoint } = desk.session.peek();
  if (checkpoint) desk.cell.value = { layer: checkpoint.layer, position: checkpoint.end - 1 };
}
