// What an operator may do with a session of another tenant.
import { html } from "../lib/html.js";
import { CloseButton } from "./close_button.js";
import { historyOf } from "./history.js";

/** Whether the server has refused to tell what the session holds. */
export const isForeign = ({ id, tenant }) => tenant !== null && historyOf(id).value.error?.status === 404;

export const Foreign = ({ view }) => html`
  <section class="panel stack" aria-labelledby="foreign">
    <h2 id="foreign">A session of another tenant</h2>
    <p>Only ${view.tenant} may read what it holds and use it. An operator sees its figures, and may close it.</p>
    <div class="row"><${CloseButton} view=${view} /></div>
  </section>
`;
