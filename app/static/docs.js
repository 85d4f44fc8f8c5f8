// Swagger UI on this server's own document. A server with keys is asked with one, which stays in this tab's memory.

const form = document.getElementById("key");
let key = "";

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

/** To resolve one part resolves all of the document, for seconds: the schemes of keys refer to nothing. */
const requestResolvedSubtree = (resolve) => (path) => path.includes("securitySchemes") || resolve(path);

async function show() {
  const answer = await fetch("openapi.json", { headers: headers() });
  form.hidden = answer.ok;
  if (!answer.ok) {
    form.querySelector("p").textContent = key ? (await answer.json()).error.message : "";
    form.querySelector("input").focus();
    return;
  }
  SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#routes",
    deepLinking: true, // a finding links to the route that tells more
    docExpansion: "none", // each change draws all open groups again
    defaultModelsExpandDepth: -1, // each route shows its own; the list of all takes seconds to draw
    plugins: [() => ({ statePlugins: { spec: { wrapActions: { requestResolvedSubtree } } } })],
    requestInterceptor: (request) => ({ ...request, headers: { ...headers(), ...request.headers } }),
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = form.querySelector("input").value.trim();
  show();
});
show();
