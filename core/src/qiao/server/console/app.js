// The console: asks the server every second while it is seen, keeps five minutes, and shows the chosen tab.

import { byModel, parse } from "./metrics.js";
import { Playground } from "./play.js";
import { setLanguage, t } from "./words.js";
import {
  make, point, showCards, showFacts, showLatency, showPlan, showQueue, showTenants,
} from "./views.js";

const EVERY_MS = 1000;
const KEPT = 300;
const WINDOW_S = 60;

const $ = (id) => document.getElementById(id);
const base = new URL("..", location.href);
const pages = [];
let facts = null;
let model = null;
let key = sessionStorage.getItem("key") ?? "";

class Refused extends Error {}

async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(new URL(path, base), { ...options, headers });
  if (response.status === 401) throw new Refused(t("badkey"));
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${response.status}`);
  }
  return response;
}

const playground = new Playground($("play"), call);

async function refresh() {
  facts = await (await call("console/state")).json();
  const samples = parse(await (await call("metrics")).text());
  pages.push({ at: performance.now() / 1000, models: byModel(samples, facts.models.map(({ name }) => name)) });
  while (pages.length > KEPT) pages.shift();
  offer();
}

// The choice of a model, where there are several; one that is gone gives way to the first.
function offer() {
  const select = $("which");
  const names = facts.models.map(({ name }) => name);
  if (JSON.stringify([...select.options].map(({ value }) => value)) !== JSON.stringify(names)) {
    const chosen = names.includes(select.value) ? select.value : names[0];
    select.replaceChildren(...names.map((name) => make("option", name, { value: name })));
    if (chosen !== undefined) select.value = chosen;
  }
  $("which-label").hidden = names.length < 2;
  model = facts.models.find(({ name }) => name === select.value) ?? null;
}

function show() {
  if (!facts) return;
  playground.offer([
    ["models", facts.models.flatMap(({ names }) => names)],
    ["adapters", facts.models.flatMap(({ adapters }) => adapters)],
    ["aliases", facts.aliases],
  ]);
  playground.relabel();
  $("views").hidden = !model;
  if (!model) return;
  const mine = pages.filter((page) => page.models.has(model.name))
    .map((page) => ({ at: page.at, samples: page.models.get(model.name) }));
  const now = mine[mine.length - 1];
  const early = mine.find((page) => page.at >= now.at - WINDOW_S);
  const points = mine.slice(1).map((page, i) => point(mine[i].samples, page.samples, page.at - mine[i].at));
  $("cards").replaceChildren();
  if (points.length) showCards($("cards"), points);
  showLatency($("latency"), early.samples, now.samples);
  showQueue($("queue"), now.samples);
  showFacts($("facts"), facts.version, model);
  showPlan($("plan-note"), $("operators"), model.info.plan, now.samples);
  showTenants($("tenants-note"), $("tenant-table"), now.samples);
}

function overall() {
  const all = facts.models.map(({ name, engine }) => `${name} · ${t(engine)}`);
  say(all.join(", ") || t("nomodel"), !all.length || facts.models.some(({ engine }) => engine !== "ready"));
}

function say(text, bad) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

async function tick() {
  try {
    if (!document.hidden) {
      await refresh();
      $("gate").hidden = true;
      overall();
      show();
    }
  } catch (error) {
    $("gate").hidden = !(error instanceof Refused);
    say(error instanceof Refused ? error.message : t("unreachable"), true);
  }
  setTimeout(tick, EVERY_MS);
}

function choose(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const mine = other === tab;
    other.setAttribute("aria-selected", String(mine));
    other.tabIndex = mine ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !mine;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
}

function tabs() {
  const all = [...document.querySelectorAll("[role=tab]")];
  all.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1 + all.length, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = all[to % all.length];
      choose(next);
      next.focus();
    });
  });
  const named = all.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
  if (named) choose(named);
}

function remember(select, name, fallback, apply) {
  select.value = localStorage.getItem(name) ?? fallback;
  apply(select.value);
  select.addEventListener("change", () => { localStorage.setItem(name, select.value); apply(select.value); show(); });
}

$("which").addEventListener("change", () => { offer(); show(); });
$("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
});
tabs();
remember($("language"), "language", navigator.language.startsWith("zh") ? "zh" : "en", setLanguage);
remember($("theme"), "theme", "auto", (name) => { document.documentElement.dataset.theme = name; });
playground.relabel();
tick();
