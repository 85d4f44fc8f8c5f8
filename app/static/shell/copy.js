// Buttons that copy what an action does: as Python, as curl, or as a link to what is seen.
import { useState } from "preact/hooks";
import { address } from "../lib/api.js";
import { html } from "../lib/html.js";
import { key } from "../state/connection.js";
import { attempt, say } from "../state/notices.js";

/** `of` has a function for each action, asked at the click: it answers the calls that the page sends, each as `call` takes it, or throws
 * what is wrong with the form. Options of a call may also have `file`, which is sent, and `out`, the file for the answer. In a path
 * `ID` is the session that a call before has opened or forked. `python` is a function that answers a text, where calls do not say
 * all. `before` has the address say what is seen, where it does not by itself. */
export function CopyAs({ of, python, before }) {
  const [chosen, choose] = useState(null);
  const names = Object.keys(of);
  const what = names.find((name) => name === chosen) ?? names[0];
  return html`<span class="copies dim" role="group" aria-label="Copy ${what}">Copy
    ${names[1] && html`<select aria-label="What to copy" value=${what} onChange=${({ target }) => choose(target.value)}>${names.map((name) => html`<option key=${name}>${name}</option>`)}</select>`} as
    <${Copy} as="Python" what=${what} text=${python ?? (() => pythonOf(...linesOf(of[what]())))} /><${Copy} as="curl" what=${what} text=${() => curlOf(of[what]())} />
    <${Copy} as="link" what=${what} text=${() => (before?.(), location.href)} />
  </span>`;
}

function Copy({ as, what, text }) {
  const copy = () => attempt(`Copy as ${as}`, async () => {
    await put(text());
    say(`Copied as ${as}: ${what}`);
  });
  return html`<button type="button" class="quiet" title="Copy as ${as}: ${what}" onClick=${copy}>${as}</button>`;
}

/** A browser has a clipboard only for pages of this machine and of https. Elsewhere it copies what is selected. */
async function put(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = Object.assign(document.createElement("textarea"), { value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser gives this page no clipboard");
  return undefined;
}

/** A JSON value as Python writes it; undefined is left out of objects. */
export function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${known(value).map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** A call of Python, as in `djinn.patching("a", by="head")`. */
export const called = (name, args, named = {}) =>
  `${name}(${[...args.map(literal), ...known(named).map(([key, value]) => `${key}=${literal(value)}`)].join(", ")})`;

const known = (fields) => Object.entries(fields).filter(([, value]) => value !== undefined);

/** Lines of Python, after those that make the client. A server with keys takes one from the environment. */
export const pythonOf = (...lines) => ["from djinn import Djinn", "", `djinn = Djinn(${JSON.stringify(address(".").href.replace(/\/$/, ""))})`, ...lines, ""].join("\n");

/** The client's name of what a call does, where it is not the last part of the path. A breakpoint is called by its action. */
const METHODS = {
  phase: "set_phase", lens: "lens_map", export: "export_to", "checkpoint/edit": "checkpoint().edit",
  pause: "break_at", capture: "capture_at", edit: "steer",
};

/** Calls as lines of Python; what the last one answers is printed. */
function linesOf(calls) {
  const lines = [];
  let opened = "session";
  calls.forEach(([, path, { body, query, out, file } = {}], at) => {
    const [, , resource, id, ...rest] = path.split("/");
    const { action, edits, until, when, positions, ...named } = { ...query, ...body };
    const verb = rest.join("/");
    Object.assign(named, { until: until?.layer ?? until, when_pass: when?.pass, positions: spanOf(positions) }, ...(edits ?? []).map(changeOf));
    if (resource === "vectors") return lines.push("from safetensors.numpy import load_file", `print(djinn.vectors.put(${literal(named.name)}, load_file(${literal(file)}).popitem()[1]))`);
    if (resource === "experiments") return lines.push(`print(${called(`djinn.${id}`, [], named)})`);
    if (!id) return lines.push(`session = ${called("djinn.sessions.create", [], named)}`);
    if (id !== "ID" && !lines[0]) lines.push(`session = djinn.sessions.get(${literal(id)})`);
    const said = called(`${id === "ID" ? opened : "session"}.${METHODS[action ?? verb] ?? verb}`, verb === "export" ? [out] : [], named);
    if (verb === "fork") lines.push(`${opened = "fork"} = ${said}`);
    else lines.push(verb === "generate" || verb === "resume" || (at + 1 === calls.length && verb !== "breakpoints") ? `print(${said})` : said);
  });
  return lines;
}

/** Positions as Python has them. */
const spanOf = (text) => (text?.includes?.(":") ? text.split(":").map(Number) : text);

/** An edit of the API as Python has it. */
const changeOf = ({ op, vector, factor, positions, ...rest }) =>
  op === "scale" ? { scale: factor, positions, ...rest } : { [op]: vector ?? true, factor, positions, ...rest };

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Reads the id of a session that was opened, for the calls after it. */
const READ_ID = `python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])'`;

/** Calls as lines for a shell. A key is there by the name of a variable: it must not get into a clipboard. */
function curlOf(calls) {
  const keyed = key.peek() ? ' -H "authorization: Bearer $DJINN_API_KEY"' : "";
  return calls.map(([method, path, { body, query, out, file } = {}]) => {
    const sent = file ? ` -H 'content-type: application/octet-stream' --data-binary @${file}`
      : body ? ` -H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}` : "";
    const verb = method === (sent ? "POST" : "GET") ? "" : ` -X ${method}`;
    const line = `curl -s${verb} ${quoted(address(path, query).href).replace("/ID/", `/'$ID'/`)}${keyed}${sent}${out ? ` -o ${out}` : ""}`;
    return /sessions$|fork$/.test(path) ? `ID=$(${line} | ${READ_ID})\n` : `${line}\n`;
  }).join("");
}
