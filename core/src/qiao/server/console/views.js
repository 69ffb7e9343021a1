// What is shown of the server: cards with small charts, latency, placement, tenants.

import { distribution, increase, mean, sum } from "./metrics.js";
import { t } from "./words.js";

const LATENCIES = [
  ["ttft", "vllm:time_to_first_token_seconds"],
  ["itl", "vllm:inter_token_latency_seconds"],
  ["e2e", "vllm:e2e_request_latency_seconds"],
  ["queue", "vllm:request_queue_time_seconds"],
];
const TENANT_TTFT = "qiao:tenant_time_to_first_token_seconds";
const SVG = "http://www.w3.org/2000/svg";

export function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const plain = (digits) => (value) => value.toFixed(value >= 100 ? 0 : digits);
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const CARDS = [
  ["generation", plain(1)], ["prompt", plain(1)], ["requests", plain(1)], ["running", plain(0)],
  ["waiting", plain(0)], ["kv", percent], ["hits", percent], ["utilization", percent], ["preemptions", plain(0)],
];

// One point of the charts from two pages that are `seconds` apart.
export function point(before, now, seconds) {
  const rate = (name) => increase(before, now, name) / seconds;
  const queries = sum(now, "vllm:prefix_cache_queries_total");
  return {
    generation: rate("vllm:generation_tokens_total"),
    prompt: rate("vllm:prompt_tokens_total"),
    requests: 60 * rate("vllm:request_success_total"),
    running: sum(now, "vllm:num_requests_running"),
    waiting: sum(now, "vllm:num_requests_waiting"),
    kv: mean(now, "vllm:kv_cache_usage_perc"),
    hits: queries ? sum(now, "vllm:prefix_cache_hits_total") / queries : 0,
    utilization: now.has("npu_gpu_utilization") ? mean(now, "npu_gpu_utilization") : null,
    preemptions: sum(now, "vllm:num_preemptions_total"),
  };
}

export function showCards(root, points) {
  const latest = points[points.length - 1];
  const cards = CARDS.filter(([name]) => latest[name] !== null).map(([name, format]) => {
    const card = make("div", undefined, { class: "card", "data-name": name });
    card.append(make("h2", t(name)), make("p", format(latest[name]), { class: "figure" }));
    card.append(chart(points.map((p) => p[name] ?? 0), name, format));
    return card;
  });
  root.replaceChildren(...cards);
}

function chart(values, name, format) {
  const svg = document.createElementNS(SVG, "svg");
  const [least, most] = [Math.min(...values), Math.max(...values)];
  svg.setAttribute("viewBox", "0 0 150 32");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const now = format(values[values.length - 1]);
  svg.setAttribute(
    "aria-label", `${t(name)}: ${t("chart")} ${now}, ${t("least")} ${format(least)}, ${t("most")} ${format(most)}`,
  );
  const line = document.createElementNS(SVG, "polyline");
  const top = Math.max(most, 1e-9);
  const x = (i) => (values.length < 2 ? 150 : (150 * i) / (values.length - 1));
  line.setAttribute("points", values.map((v, i) => `${x(i).toFixed(1)},${(31 - (30 * v) / top).toFixed(1)}`).join(" "));
  svg.append(line);
  return svg;
}

function seconds(value) {
  return value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

export function showLatency(table, before, now) {
  const rows = LATENCIES.map(([word, name]) => {
    const row = make("tr");
    row.append(make("th", t(word), { scope: "row" }));
    const found = distribution(before, now, name);
    const cells = found
      ? [found.quantile(0.5), found.quantile(0.95), found.quantile(0.99), found.mean].map(seconds)
      : [t("none"), "", "", ""];
    row.append(...cells.map((text) => make("td", text)), make("td", String(found ? found.count : 0)));
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
}

export function showQueue(table, samples) {
  const waiting = byLabel(samples, "qiao:num_requests_waiting_by_priority", "priority");
  const rows = [...waiting].map(([name, count]) => {
    const row = make("tr");
    row.append(make("th", t(name), { scope: "row" }), make("td", String(count)));
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
}

export function showFacts(list, version, model) {
  const { info } = model;
  const facts = [
    ["names", [...model.names, ...model.adapters].join(", ")],
    ["device", `${info.device}, ${info.dtype}`],
    ["context", `${info.max_model_len} ${t("tokens")}`],
    ["cache", `${info.num_blocks * info.block_size} ${t("tokens")}`],
    ["version", version],
    ["since", new Date(1000 * model.created).toLocaleString(document.documentElement.lang)],
  ];
  list.replaceChildren(...facts.flatMap(([word, text]) => [make("dt", t(word)), make("dd", text)]));
}

function byLabel(samples, name, label) {
  const found = new Map();
  for (const { labels, value } of samples.get(name) ?? []) {
    found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  }
  return found;
}

export function showPlan(note, table, plan, samples) {
  const calls = byLabel(samples, "qiao:fallback_calls_total", "operator");
  const bytes = byLabel(samples, "qiao:fallback_bytes_total", "operator");
  const spent = byLabel(samples, "qiao:fallback_seconds_total", "operator");
  const operators = plan.operators ?? [];
  const rows = operators.map((entry) => {
    const away = Boolean(entry.policy);
    const row = make("tr", undefined, away ? { class: "away" } : {});
    row.append(make("th", entry.operator, { scope: "row" }), make("td", entry.group ?? ""));
    row.append(make("td", entry.place ?? ""), make("td", entry.reason ?? ""));
    for (const counts of [calls, bytes, spent]) {
      const value = counts.get(entry.operator);
      row.append(make("td", value === undefined ? "" : value.toLocaleString(undefined, { maximumFractionDigits: 3 })));
    }
    return row;
  });
  const lacking = operators.filter((entry) => entry.policy).length;
  note.textContent = lacking ? `${lacking} ${t("fallbacks")}` : t("nofallback");
  table.tBodies[0].replaceChildren(...rows);
}

// One row a tenant, one column a counter whose name starts with qiao:tenant_, and the mean time to the first token.
export function showTenants(note, table, samples) {
  const names = [...samples.keys()].filter((n) => n.startsWith("qiao:tenant_") && n.endsWith("_total")).sort();
  const columns = names.map((name) => byLabel(samples, name, "tenant"));
  const [total, count] = ["sum", "count"].map((part) => byLabel(samples, `${TENANT_TTFT}_${part}`, "tenant"));
  const means = [...count].filter(([, n]) => n > 0).map(([tenant, n]) => [tenant, seconds(total.get(tenant) / n)]);
  columns.push(new Map(means));
  const tenants = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort();
  note.textContent = tenants.length ? "" : t("notenants");
  table.hidden = !tenants.length;
  const short = (name) => name.replace("qiao:tenant_", "").replace(/_total$/, "").replaceAll("_", " ");
  const heads = ["", ...names.map(short), `${t("ttft")}, ${t("mean")}`];
  table.tHead.rows[0].replaceChildren(...heads.map((text) => make("th", text, { scope: "col" })));
  const rows = tenants.map((tenant) => {
    const row = make("tr");
    row.append(make("th", tenant, { scope: "row" }));
    row.append(...columns.map((column) => make("td", String(column.get(tenant) ?? ""))));
    return row;
  });
  table.tBodies[0].replaceChildren(...rows);
}
