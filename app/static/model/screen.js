// The screen inside the model: one session, layer by layer.
import { useEffect } from "preact/hooks";
import { html } from "../lib/html.js";
import { server } from "../state/connection.js";
import { Loading } from "../shell/states.js";
import { Compare } from "./compare.js";
import { deskOf } from "./desk.js";
import { EditForm } from "./edit_form.js";
import { Lens } from "./lens.js";
import { Norms } from "./norms.js";
import { Standing } from "./standing.js";
import { Throughput } from "./throughput.js";
import { Turn } from "./turn.js";
import { TwoPrompts } from "./two_prompts.js";
import { Vectors } from "./vectors.js";
import { refreshVectors } from "./vector_list.js";

export function ModelScreen({ id }) {
  useEffect(() => void refreshVectors(), []);
  if (server.value === null) return html`<${Loading} what="the model's size" />`;
  const desk = deskOf(id);
  return html`
    <div class="model">
      <${Standing} desk=${desk} />
      <${Turn} desk=${desk} />
      <${Throughput} id=${id} />
      <${Lens} desk=${desk} />
      <${EditForm} desk=${desk} />
      <${Compare} desk=${desk} />
      <${Norms} desk=${desk} />
      <${TwoPrompts} desk=${desk} />
      <${Vectors} />
    </div>
  `;
}
