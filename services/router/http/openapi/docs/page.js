// Loads the OpenAPI document and shows its routes by tag.

import { Schemas, element, prose } from "./schema.js";

const shown = (id) => document.getElementById(id);
const JSON_TYPE = "application/json";
const STREAM_TYPE = "text/event-stream";

async function load(key) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { headers, signal: AbortSignal.timeout(20000) });
  shown("key").hidden = answer.status !== 401;
  if (answer.status === 401) {
    if (key) shown("notice").textContent = "The key is not valid.";
    return;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  show(await answer.json());
  shown("notice").textContent = "";
}

async function loadOrSay(key) {
  try {
    await load(key);
  } catch (error) {
    shown("notice").textContent = `The document could not be loaded: ${error.message}`;
  }
}

function show(api) {
  const schemas = new Schemas(api.components.schemas);
  shown("version").textContent = api.info.version;
  const main = [...api.info.description.split("\n\n").map((text) => element("p", {}, ...prose(text)))];
  const links = [];
  for (const tag of api.tags) {
    main.push(element("h2", {}, tag.name), element("p", { class: "dim" }, ...prose(tag.description)));
    links.push(element("h2", {}, tag.name));
    for (const [path, methods] of Object.entries(api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        if (!operation.tags.includes(tag.name)) continue;
        main.push(section(api, schemas, method, path, operation));
        const link = element("a", { href: `#${operation.operationId}` }, badge(method), path);
        links.push(link);
      }
    }
  }
  shown("operations").replaceChildren(...main);
  shown("routes").replaceChildren(...links);
  document.documentElement.dataset.shown = "yes";
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

function badge(method) {
  return element("span", { class: `method ${method}` }, method === "delete" ? "DEL" : method.toUpperCase());
}

function section(api, schemas, method, path, operation) {
  const title = element("h3", {}, badge(method), " ", element("span", { class: "path" }, path));
  const made = element("section", { id: operation.operationId }, title);
  made.append(element("p", {}, ...prose(operation.summary)));
  if (operation.parameters.length) {
    const rows = operation.parameters.map((each) => {
      const schema = { ...each.schema, description: each.description };
      return schemas.row(`${each.name} (${each.in})`, schema, each.required);
    });
    made.append(element("h4", {}, "Parameters"), element("div", { class: "scroll" }, element("table", {}, ...rows)));
  }
  const body = operation.requestBody?.content[JSON_TYPE];
  if (body) {
    made.append(element("h4", {}, "Body"), schemas.closed(schemas.refs(body.schema)[0]));
    if (body.example) made.append(element("pre", {}, curl(api, path, operation, body.example)));
  }
  made.append(element("h4", {}, "Responses"));
  const failures = new Map();
  for (const [status, response] of Object.entries(operation.responses)) {
    const name = schemas.refs(response.content[JSON_TYPE].schema)[0];
    if (status === "200") {
      made.append(...answers(schemas, status, name, response.content[STREAM_TYPE]));
    } else {
      failures.set(name, [...(failures.get(name) ?? []), status]);
    }
  }
  for (const [name, statuses] of failures) {
    made.append(schemas.closed(name, `${statuses.join(", ")}: `));
  }
  return made;
}

function answers(schemas, status, name, stream) {
  const found = [schemas.closed(name, `${status}: `)];
  if (!stream) return found;
  const event = schemas.refs(stream.schema)[0];
  return [...found, schemas.closed(event, `${status}, each event of a stream: `)];
}

function curl(api, path, operation, example) {
  const needsKey = (operation.security ?? api.security ?? []).length > 0;
  const key = needsKey ? ` \\\n  -H "authorization: Bearer $KEY"` : "";
  const url = new URL(`.${path}`, location.href);
  const body = JSON.stringify(example).replaceAll("'", "'\\''");
  return `curl ${url}${key} \\\n  -H 'content-type: application/json' \\\n  -d '${body}'`;
}

shown("key").addEventListener("submit", (event) => {
  event.preventDefault();
  loadOrSay(shown("key-text").value);
});
loadOrSay("");
