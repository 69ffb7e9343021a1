// The console: asks the server every second while it is seen, keeps five minutes, and shows the chosen tab.

import { parse } from "./metrics.js";
import { Playground } from "./play.js";
import { setLanguage, t } from "./words.js";
import { point, showCards, showFacts, showLatency, showPlan, showTenants } from "./views.js";

const EVERY_MS = 1000;
const KEPT = 300;
const WINDOW_S = 60;

const $ = (id) => document.getElementById(id);
const base = new URL("..", location.href);
const pages = [];
const points = [];
let facts = null;
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
  const page = { at: performance.now() / 1000, samples: parse(await (await call("metrics")).text()) };
  const last = pages[pages.length - 1];
  pages.push(page);
  while (pages.length > KEPT) pages.shift();
  if (last) points.push(point(last.samples, page.samples, page.at - last.at));
  while (points.length > KEPT) points.shift();
}

function show() {
  if (!facts) return;
  const now = pages[pages.length - 1];
  const early = pages.find((page) => page.at >= now.at - WINDOW_S);
  if (points.length) showCards($("cards"), points);
  showLatency($("latency"), early.samples, now.samples);
  showFacts($("facts"), facts);
  showPlan($("plan-note"), $("operators"), facts.info.plan, now.samples);
  showTenants($("tenants-note"), $("tenant-table"), now.samples);
  playground.offer(facts.models);
  playground.relabel();
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
      say(`${facts.models[0]} · ${t(facts.engine)}`, facts.engine !== "ready");
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
