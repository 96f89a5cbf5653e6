// The dashboard: asks for its document again and again, and shows it. Names in it come from
// clients and workers: they become text nodes and never HTML.

import { History, bytes, count, linkRates, linksOf, percent, seconds } from "./numbers.js";

const INTERVAL_MS = 1000;
const LONGEST_MS = 30000; // between two attempts while nobody answers
const TIMEOUT_MS = 5000;
const LEAST_POINTS = 60; // a sparkline is this wide, and later as wide as its series
const PARTS = ["queued", "prefill", "transfer", "first token", "tokens", "no token"];
const GOOD = ["ok", "ready"];
const BAD = ["failed", "unreachable", "no decode worker", "another model", "another version"];

const history = new History();
let failures = 0, timer = null, isAsking = false, answeredAt = null, shownIds = null;

const place = (id) => document.getElementById(id);

/** Make an element. Text is text; a child may be a node or text. */
function make(tag, classes = "", ...children) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.map((each) => (each instanceof Node ? each : String(each))));
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** A line of a series, which ends at the right edge; there is none where a value is not known. */
function sparkline(names) {
  const all = names.map((name) => history.series.get(name) ?? []);
  const known = all.flat().filter((value) => value !== null);
  const top = Math.max(...known, 0) || 1;
  const width = Math.max(LEAST_POINTS, ...all.map((points) => points.length)), height = 30;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  all.forEach((points, which) => {
    let path = "", isDown = false;
    points.forEach((value, index) => {
      if (value === null) {
        isDown = false;
        return;
      }
      const x = width - points.length + index + 1, y = height - 1 - (height - 3) * value / top;
      path += `${isDown ? "L" : `M${x - 1} ${y.toFixed(1)}L`}${x} ${y.toFixed(1)}`;
      isDown = true;
    });
    picture.prepend(svg("path", { d: path || "M0 0", class: which ? "line second" : "line" }));
  });
  return picture;
}

function tile(name, value, more, series) {
  return make("div", "tile", make("div", "name", name), make("div", "value", value),
    make("div", "more", more), sparkline(series));
}

function showTiles(numbers, found) {
  const limit = found.live.reduce((total, each) => total + each.queue_limit, 0);
  place("tiles").replaceChildren(
    tile("Requests running", count(numbers.running), `${count(numbers.waiting)} waiting, limit ${count(limit)}`, ["running", "waiting"]),
    tile("Tokens generated", `${count(numbers.output)}/s`, "", ["output"]),
    tile("Prompt tokens", `${count(numbers.prompt)}/s`, `${percent(numbers.cachedShare)} of them cached`, ["prompt"]),
    tile("Time to first token", seconds(numbers.ttft50), `95 % below ${seconds(numbers.ttft95)}`, ["ttft50", "ttft95"]),
    tile("Gap between tokens", seconds(numbers.gap50), `95 % below ${seconds(numbers.gap95)}`, ["gap50", "gap95"]),
    tile("KV transferred", numbers.transfer === null ? "–" : `${bytes(numbers.transfer)}/s`, "", ["transfer"]),
  );
}

/** Fill a table. A column is [heading, class, cell of a row]; a cell is text or a node. */
function fill(id, columns, rows, empty) {
  if (!rows.length) {
    place(id).replaceChildren(make("caption", "empty", empty));
    return;
  }
  const head = make("tr", "", ...columns.map(([name, kind]) => make("th", kind, name)));
  const body = rows.map((row) => make("tr", "", ...columns.map(([, kind, cell]) => {
    const content = cell(row);
    const node = make("td", kind, content);
    if (!(content instanceof Node)) node.title = content;
    return node;
  })));
  place(id).replaceChildren(make("thead", "", head), make("tbody", "", ...body));
}

function bar(kind, parts) {
  const node = make("div", `bar ${kind}`);
  for (const [name, share, title] of parts) {
    const part = make("i", name);
    part.style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;
    part.title = title;
    node.append(part);
  }
  return node;
}

function state(name, text = name) {
  const kind = GOOD.includes(name) ? "good" : BAD.includes(name) ? "bad" : "";
  return make("span", `state ${kind}`, text);
}

function kvBar({ load }) {
  if (!load?.total_blocks) return make("span", "dim", "–");
  const { total_blocks: total, used_blocks: used, cached_blocks: cached } = load;
  const text = (name, blocks) => `${count(blocks)} of ${count(total)} blocks ${name}`;
  return bar("", [["used", used / total, text("used", used)], ["cached", cached / total, text("cached", cached)]]);
}

function showWorkers(found) {
  const load = (name) => (worker) => count(worker.load?.[name]);
  const used = ({ load }) => percent(load?.total_blocks ? load.used_blocks / load.total_blocks : null);
  const states = found.services.map((worker) => worker.state), names = [...new Set(states)].sort();
  place("states").replaceChildren(...names.map((name) => (
    state(name, `${count(states.filter((each) => each === name).length)} ${name}`))));
  fill("workers", [
    ["worker", "id", (worker) => worker.id],
    ["role", "", (worker) => worker.role],
    ["state", "", (worker) => state(worker.state)],
    ["running", "number", load("running")],
    ["waiting", "number", load("waiting")],
    ["queued tokens", "number", load("queued_prefill_tokens")],
    ["KV", "wide", kvBar],
    ["used", "number", used],
    ["blocks", "number", load("total_blocks")],
    ["context", "number", (worker) => count(worker.max_model_len)],
  ], found.services, "No worker is known.");
}

function showLinks(found) {
  const rates = linkRates(history.documents[0], found), links = linksOf(found);
  place("links-section").hidden = !links.length;
  fill("links", [
    ["from", "id", (link) => link.peer],
    ["to", "id", (link) => link.to],
    ["transport", "", (link) => link.transport],
    ["now", "number", (link) => (rates.has(link.key) ? `${bytes(rates.get(link.key))}/s` : "–")],
    ["in all", "number", (link) => bytes(link.bytes)],
    ["measured", "number", (link) => (link.gb_per_s ? `${bytes(link.gb_per_s * 1e9)}/s` : "–")],
  ], links, "");
}

function showRouters(found) {
  const live = new Map(found.live.map((each) => [each.id, each]));
  const number = (name) => (router) => count(live.get(router.id)?.[name]);
  fill("routers", [
    ["router", "id", (router) => router.id],
    ["state", "", (router) => state(found.silent.includes(router.id) ? "unreachable" : router.state)],
    ["running", "number", number("running")],
    ["waiting", "number", number("waiting")],
    ["limit", "number", number("queue_limit")],
    ["tokens so far", "number", number("output_tokens")],
  ], found.routers, "");
}

const partClass = (name) => (PARTS.includes(name) ? `part-${name.replaceAll(" ", "-")}` : "part-other");

function showRequests(found) {
  const ids = JSON.stringify(found.requests.map((each) => [each.id, each.ended_at]));
  if (ids === shownIds || !document.getSelection().isCollapsed) return; // one copies an id
  shownIds = ids;
  const longest = Math.max(...found.requests.map((each) => each.duration_s), 0) || 1;
  const anatomy = (request) => bar("plain", (request.parts ?? []).map((part) => (
    [partClass(part.name), part.seconds / longest, `${part.name}: ${seconds(part.seconds)}`])));
  const ended = (request) => new Date(request.ended_at * 1000).toLocaleTimeString("en-GB");
  const prompt = ({ prompt_tokens: all, cached_tokens: cached }) => (
    cached ? `${count(all)} (${count(cached)})` : count(all));
  fill("requests", [
    ["ended", "dim", ended],
    ["id", "id mono", (request) => request.id],
    ["key", "id", (request) => request.key ?? "–"],
    ["status", "", (request) => state(request.outcome === "ok" ? "ok" : `${request.status || ""} ${request.outcome}`)],
    ["prompt (cached)", "number", prompt],
    ["output", "number", (request) => count(request.output_tokens)],
    ["TTFT", "number", (request) => seconds(request.ttft_s)],
    ["time", "number", (request) => seconds(request.duration_s)],
    ["where it went", "wide", anatomy],
    ["workers", "id", (request) => (request.workers ?? []).join(" → ") || "–"],
  ], found.requests, "No request has ended since the routers started.");
  const names = new Set(found.requests.flatMap((each) => (each.parts ?? []).map((part) => part.name)));
  const shown = [...PARTS.filter((name) => names.has(name)), ...[...names].filter((name) => !PARTS.includes(name))];
  place("parts").replaceChildren(...shown.map((name) => make("span", "part", make("i", partClass(name)), name)));
}

function show(found) {
  const numbers = history.add(found);
  place("model").textContent = found.model;
  place("status").replaceChildren(state(found.status));
  document.title = `Pagewire · ${found.model}`;
  const notices = [];
  if (found.waiting_for.length) notices.push(`waiting for ${found.waiting_for.join(", ")}`);
  if (found.redis !== "up") notices.push("Redis does not answer");
  if (found.silent.length) notices.push(`without the numbers of ${found.silent.join(", ")}`);
  place("notice").textContent = notices.join(" · ");
  showTiles(numbers, found);
  showWorkers(found);
  showLinks(found);
  showRouters(found);
  showRequests(found);
}

function showAge() {
  const age = answeredAt === null ? null : Math.round((performance.now() - answeredAt) / 1000);
  place("age").textContent = age === null ? "" : age < 3 ? "live" : `${age} s old`;
}

/** Ask, and ask again later as long as the page is visible; never twice at once. */
async function ask() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  try {
    const response = await fetch("dashboard/data", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    const found = await response.json();
    failures = 0;
    answeredAt = performance.now();
    if (found.at !== history.documents.at(-1)?.at) show(found);
    document.documentElement.dataset.shown = "yes";
  } catch (error) {
    failures += 1;
    place("notice").textContent = `No answer from the operator port: ${error.message}`;
  }
  isAsking = false;
  showAge();
  if (!document.hidden) timer = setTimeout(ask, Math.min(LONGEST_MS, INTERVAL_MS * 2 ** failures));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else ask();
});
ask();
