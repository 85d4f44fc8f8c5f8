// What the page does, written as Python or as curl, so that people can do it again without the page.

const base = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

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
export const pythonOf = (...lines) => ["from djinn import Djinn", "", `djinn = Djinn(${JSON.stringify(base())})`, ...lines, ""].join("\n");

/** The same, for a session that is there. */
export const pythonIn = (id, ...lines) => pythonOf(`session = djinn.sessions.get(${JSON.stringify(id)})`, ...lines);

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Reads the id of a session that was opened, for the calls after it. */
const READ_ID = `python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])'`;

/** Calls of the API as lines for a shell: each is `[method, path, body, out]`, and `out` a file for the answer. In a path `ID` is the
 * session that the first call has opened. `isKeyed` adds the key, by the name of a variable: a key itself must not get into a
 * clipboard. */
export function curlOf(calls, isKeyed) {
  const key = isKeyed ? ' -H "authorization: Bearer $DJINN_API_KEY"' : "";
  return calls.map(([method, path, body, out]) => {
    const sent = body === undefined ? "" : ` -H 'content-type: application/json' -d ${quoted(JSON.stringify(body))}`;
    const verb = method === (body === undefined ? "GET" : "POST") ? "" : ` -X ${method}`;
    const line = `curl -s${verb} ${quoted(base() + path).replace("/ID/", `/'$ID'/`)}${key}${sent}${out ? ` -o ${out}` : ""}`;
    return path === "/v1/sessions" ? `ID=$(${line} | ${READ_ID})\n` : `${line}\n`;
  }).join("");
}
