// The playground: a conversation with streamed answers whose tokens show how likely they were.

import { t } from "./words.js";
import { make } from "./views.js";

const ALTERNATIVES = 5;

// Server-sent events of a response, as parsed JSON.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

export class Playground {
  constructor(root, call) {
    this.root = root;
    this.call = call;
    this.messages = [];
    this.abort = null;
    this.pending = [];
    this.find = (id) => root.querySelector(`#${id}`);
    this.find("ask").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    this.find("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    this.find("stop").addEventListener("click", () => this.abort?.abort());
    this.find("clear").addEventListener("click", () => this.clear());
  }

  // Everything that a request may name, in groups; what is chosen stays chosen while it is there.
  offer(groups) {
    const select = this.find("model");
    const text = JSON.stringify(groups);
    if (select.dataset.offered === text) return;
    const chosen = select.value;
    const filled = groups.filter(([, names]) => names.length).map(([word, names]) => {
      const group = make("optgroup", undefined, { label: t(word), "data-word-label": word });
      group.append(...names.map((name) => make("option", name, { value: name })));
      return group;
    });
    select.replaceChildren(...filled);
    select.dataset.offered = text;
    if (groups.some(([, names]) => names.includes(chosen))) select.value = chosen;
  }

  relabel() {
    for (const group of this.find("model").children) group.label = t(group.dataset.wordLabel);
    if (!this.find("token").dataset.filled) this.find("token").textContent = t("pick");
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.find("conversation").replaceChildren();
    delete this.find("token").dataset.filled;
    this.relabel();
    this.find("message").focus();
  }

  body() {
    const system = this.find("system").value.trim();
    return {
      model: this.find("model").value,
      messages: system ? [{ role: "system", content: system }, ...this.messages] : this.messages,
      temperature: Number(this.find("temperature").value),
      max_tokens: Number(this.find("max-tokens").value),
      stream: true,
      logprobs: true,
      top_logprobs: ALTERNATIVES,
    };
  }

  turn(who, text) {
    const article = make("article", undefined, { class: who });
    const content = make("div", text, { class: "text" });
    article.append(make("h3", t(who)), content);
    this.find("conversation").append(article);
    article.scrollIntoView({ block: "end" });
    return content;
  }

  async send() {
    const field = this.find("message");
    if (!field.value.trim() || this.abort) return;
    this.messages.push({ role: "user", content: field.value });
    this.turn("you", field.value);
    field.value = "";
    const content = this.turn("answer", "");
    this.abort = new AbortController();
    this.busy(true);
    let text = "";
    this.pending = [];
    try {
      const response = await this.call("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(this.body()),
        signal: this.abort.signal,
      });
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        text += this.take(event.choices[0], content);
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      content.append(make("p", stopped ? t("stopped") : `${t("failed")} ${error.message}`, { class: "problem" }));
    }
    this.messages.push({ role: "assistant", content: text });
    this.abort = null;
    this.busy(false);
    field.focus();
  }

  busy(now) {
    this.find("send").disabled = now;
    this.find("stop").disabled = !now;
    this.find("conversation").setAttribute("aria-busy", String(now));
  }

  // A button for each token, or for the tokens that only together make a character.
  take(choice, content) {
    const entries = choice?.logprobs?.content ?? [];
    entries.forEach((entry, i) => {
      this.pending.push(entry);
      const last = Boolean(choice.finish_reason) && i === entries.length - 1;
      const text = together(this.pending, last);
      if (text === null) return;
      const ends = last && !(choice.delta?.content ?? "").endsWith(text);
      content.append(this.button(text, this.pending, ends));
      this.pending = [];
    });
    return choice?.delta?.content ?? "";
  }

  button(text, entries, ends) {
    const share = Math.exp(entries.reduce((total, entry) => total + entry.logprob, 0));
    const button = make("button", text, { type: "button", class: ends ? "tok end" : "tok" });
    button.style.setProperty("--share", share.toFixed(3));
    button.setAttribute("aria-label", `${text}, ${t("probability")} ${(100 * share).toFixed(1)} %`);
    button.addEventListener("click", () => this.explain(entries));
    button.addEventListener("focus", () => this.explain(entries));
    return button;
  }

  explain(entries) {
    this.find("token").dataset.filled = "yes";
    this.find("token").replaceChildren(...entries.map(candidates));
  }
}

// The text of tokens, null while their bytes end inside a character and more may come.
function together(entries, last) {
  if (entries.length === 1 && !entries[0].bytes) return entries[0].token;
  const bytes = Uint8Array.from(entries.flatMap((entry) => entry.bytes ?? []));
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return last || bytes.length > 8 ? entries.map((entry) => entry.token).join("") : null;
  }
}

function candidates(entry) {
  const table = make("table");
  for (const row of [entry, ...entry.top_logprobs.filter((other) => other.token !== entry.token)]) {
    const share = Math.exp(row.logprob);
    const line = table.insertRow();
    line.append(make("th", JSON.stringify(row.token), { scope: "row" }));
    line.append(make("td", row === entry ? t("chosen") : ""), make("td", `${(100 * share).toFixed(2)} %`));
    const meter = make("td");
    meter.append(make("meter", undefined, { min: 0, max: 1, value: share, "aria-hidden": "true" }));
    line.append(meter);
  }
  return table;
}
