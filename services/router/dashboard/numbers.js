// What the document's counters say of the last seconds, and how numbers are written. No DOM here.

export const WINDOW_S = 10; // shown are the numbers of the time since this long ago
const MAX_DOCUMENTS = 60;
const MAX_POINTS = 180;

/** Documents of the last seconds, and series of what they gave. */
export class History {
  constructor() {
    this.documents = [];
    this.series = new Map();
  }

  /** Take a document; returns the numbers of the window that ends with it. */
  add(found) {
    const last = this.documents.at(-1);
    if (last && found.at <= last.at) this.documents = []; // a clock that was set back
    this.documents.push(found);
    while (this.documents.length > MAX_DOCUMENTS
      || (this.documents.length > 2 && this.documents[1].at <= found.at - WINDOW_S)) {
      this.documents.shift();
    }
    const numbers = between(this.documents[0], found);
    for (const [name, value] of Object.entries(numbers)) {
      const points = this.series.get(name) ?? [];
      points.push(value);
      if (points.length > MAX_POINTS) points.shift();
      this.series.set(name, points);
    }
    return numbers;
  }
}

/** The numbers of the time between two documents; null where nothing is known. */
export function between(before, now) {
  const seconds = now.at - before.at;
  const pairs = now.live.flatMap((router) => {
    const old = before.live.find((each) => each.id === router.id && each.epoch === router.epoch);
    return old ? [[old, router]] : [];
  });
  const grown = (name) => sum(pairs.map(([old, router]) => router[name] - old[name]));
  const rate = (value) => (seconds > 0 ? value / seconds : null);
  const ttft = added(pairs, "ttft"), gaps = added(pairs, "gaps");
  const prompt = grown("prompt_tokens");
  return {
    running: sum(now.live.map((each) => each.running)),
    waiting: sum(now.live.map((each) => each.waiting)),
    output: rate(grown("output_tokens")),
    prompt: rate(prompt),
    cachedShare: prompt > 0 ? grown("cached_tokens") / prompt : null,
    ttft50: quantile(ttft, 0.5), ttft95: quantile(ttft, 0.95),
    gap50: quantile(gaps, 0.5), gap95: quantile(gaps, 0.95),
    transfer: rate(transferred(before, now)),
  };
}

/** KV bytes that crossed by all links between two documents. */
function transferred(before, now) {
  const old = new Map(linksOf(before).map((link) => [link.key, link.bytes]));
  return sum(linksOf(now).map((link) => Math.max(0, link.bytes - (old.get(link.key) ?? link.bytes))));
}

/** The KV links of a document; the key names a link of these runs of its workers. */
export function linksOf(found) {
  const epochs = new Map(found.services.map((each) => [each.id, each.epoch]));
  return found.services.flatMap((to) => to.links.map((link) => ({
    ...link, to: to.id, bytes: link.bytes ?? 0,
    key: JSON.stringify([link.peer, epochs.get(link.peer), to.id, to.epoch, link.transport]),
  })));
}

/** Bytes a second of each link between two documents, by its key. */
export function linkRates(before, now) {
  const seconds = now.at - before.at;
  const old = new Map(linksOf(before).map((link) => [link.key, link.bytes]));
  return new Map(linksOf(now).filter((link) => old.has(link.key) && seconds > 0)
    .map((link) => [link.key, Math.max(0, link.bytes - old.get(link.key)) / seconds]));
}

function added(pairs, name) {
  const all = pairs.map(([old, router]) => ({
    bounds: router[name].bounds,
    counts: router[name].counts.map((count, index) => count - (old[name].counts[index] ?? 0)),
  }));
  if (!all.length) return { bounds: [], counts: [] };
  const counts = all[0].counts.map((_, index) => sum(all.map((each) => each.counts[index] ?? 0)));
  return { bounds: all[0].bounds, counts };
}

/** As Prometheus' histogram_quantile: within a bucket, values count as evenly spread. */
export function quantile({ bounds, counts }, share) {
  let rank = share * sum(counts), lower = 0;
  if (!rank) return null;
  for (let index = 0; index < bounds.length; index += 1) {
    if (counts[index] && rank <= counts[index]) {
      return lower + (bounds[index] - lower) * rank / counts[index];
    }
    rank -= counts[index];
    lower = bounds[index];
  }
  return lower;
}

export function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let index = 0;
  while (value >= 1000 && index < units.length - 1) {
    value /= 1000;
    index += 1;
  }
  return `${index && value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[index]}`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}
