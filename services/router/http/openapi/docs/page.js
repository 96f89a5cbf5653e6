// Loads the OpenAPI document, with a key if the server asks for one, and lets Swagger UI show it.

const shown = (id) => document.getElementById(id);

async function load(key) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { headers, signal: AbortSignal.timeout(20000) });
  shown("key").hidden = answer.status !== 401;
  if (answer.status === 401) {
    if (key) shown("notice").textContent = "The key is not valid.";
    return;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  shown("notice").textContent = "";
  const ui = SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#content",
    deepLinking: true,
    tryItOutEnabled: true,
    validatorUrl: null,
    defaultModelsExpandDepth: 0,
    onComplete() {
      if (key) ui.preauthorizeApiKey("bearer", key);
      document.documentElement.dataset.shown = "yes";
    },
  });
}

async function loadOrSay(key) {
  try {
    await load(key);
  } catch (error) {
    shown("notice").textContent = `The document cannot be loaded: ${error.message}`;
  }
}

shown("key").addEventListener("submit", (event) => {
  event.preventDefault();
  loadOrSay(shown("key-text").value);
});
loadOrSay("");
