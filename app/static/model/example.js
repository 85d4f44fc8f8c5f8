// One click to something worth seeing: a question whose turn stands where the model is about to know the answer.
import { call } from "../lib/api.js";
import { html } from "../lib/html.js";
import { Button } from "../shell/controls.js";
import { CopyAs } from "../shell/copy.js";
import { server } from "../state/connection.js";
import { attempt } from "../state/notices.js";
import { go, linkTo } from "../state/route.js";
import { add } from "../state/sessions.js";
import { generate } from "../state/turns.js";
import { marksOf, pausing, togglePause, watching } from "./arming.js";
import { deskOf, show } from "./desk.js";

const QUESTION = "The Eiffel Tower stands in the city of";

/** For a session without a history: ask, pause, and choose the cell of the answer. */
export const TryIt = ({ desk, why }) => html`
  <${Button} why=${why} onClick=${() => attempt("Try", () => ask(desk, { question: QUESTION }))} title="It is paused after the last layer, so that you see the answer come">
    Try: “${QUESTION}”
  <//>
  <${CopyAs} of=${{ "the question": () => [
    watching(desk, server.peek().num_layers), pausing(desk, server.peek().num_layers - 1, ONCE),
    ["POST", `/v1/sessions/${desk.id}/generate`, { body: turnOf(QUESTION) }],
  ] }} />
`;

const ONCE = { once: true, pass: "any" };
const turnOf = (prompt) => ({ prompt, max_tokens: 8, temperature: 0 });

/** The same in a session of its own. */
export const LookInside = ({ children = "Look inside the model" }) =>
  html`<${Button} onClick=${() => attempt("Look inside", () => open("The Eiffel Tower", { question: QUESTION }))}>${children}<//>`;

/** A session that stands after a layer of another question, with the cell of a position chosen; null: of the last one. */
export const LookAt = ({ question, layer, position }) =>
  html`<${Button} onClick=${() => attempt("Look inside", () => open(question, { question, layer, position }))}>Look inside there<//>`;

const LONGEST_NAME = 60;

async function open(name, asked) {
  const view = await call("POST", "/v1/sessions", { body: { metadata: { name: name.slice(0, LONGEST_NAME) } } });
  add(view);
  go(linkTo(view.id, "model"));
  await ask(deskOf(view.id), asked);
}

/** Without a `layer` the turn stops after the last one: all of the map is there, and the model has not spoken yet. */
async function ask(desk, { question, layer = server.peek().num_layers - 1, position = null }) {
  if (!marksOf(desk.breakpoints.peek(), layer).pauses.length) await togglePause(desk, layer, ONCE, server.peek().num_layers);
  await generate(desk.id, turnOf(question), question);
  const { checkpoint } = desk.session.peek();
  if (!checkpoint) return;
  desk.cell.value = { layer: checkpoint.layer, position: position ?? checkpoint.end - 1 };
  show("lens");
}
