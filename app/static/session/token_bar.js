// What is known of the chosen token, and the button that rewinds to it. Its place is kept when none is chosen.
import { useState } from "preact/hooks";
import { call } from "../lib/api.js";
import { counted, number } from "../lib/format.js";
import { html } from "../lib/html.js";
import { Confirm } from "../shell/confirm.js";
import { put } from "../state/sessions.js";
import { loadHistory } from "./history.js";
import { isIn } from "./marks.js";

export function TokenBar({ view, tokens, marks, chosen }) {
  const [asked, ask] = useState(null);
  const position = chosen.value?.position ?? null;
  const token = position === null ? undefined : tokens[position];
  const why = whyNot(view, token);
  return html`
    <div class="token-bar">
      <p aria-live="polite">${token ? html`<${About} token=${token} position=${position} marks=${marks} />`
        : html`<span class="dim">Point at a token, or press ← and → among them, to see its position, id and text.</span>`}</p>
      <button id="rewind-here" disabled=${why !== null} title=${why ?? "Drops this token and all after it"}
        onClick=${() => ask(position)}>Rewind to here</button>
    </div>
    ${asked !== null && html`<${Confirm} title=${`Rewind to position ${number(asked)}?`}
      action=${`Drop ${counted(tokens.length - asked, "token")}`} onClose=${() => ask(null)}
      run=${() => rewind(view.id, asked, chosen)}>
      The session forgets what stands from position ${number(asked)} on. A fork made before keeps it.
    <//>`}
  `;
}

const About = ({ token, position, marks }) => html`
  Position <b class="number">${number(position)}</b> · id <b class="number">${token.id}</b> ·
  text <code>${JSON.stringify(token.text)}</code>${token.special && " · special"}
  ${["generated", "cached", "recomputed"].filter((name) => isIn(marks[name], position)).map((name) => ` · ${WORDS[name]}`)}
`;

const WORDS = { generated: "generated", cached: "cached", recomputed: "computed again" };

function whyNot({ state }, token) {
  if (token === undefined) return "Choose a token first";
  return state === "idle" ? null : `The session is ${state}: only an idle one can be rewound`;
}

async function rewind(id, to_token, chosen) {
  put(await call("POST", `/v1/sessions/${id}/rewind`, { body: { to_token } }));
  chosen.value = null;
  await loadHistory(id);
}
