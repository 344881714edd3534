// A live tail of decisions, the explanation of one, and a box to explain a request that is not sent.

import { card, empty, h, setText } from "./dom.js";
import { amount, clock, percent, seconds, timestamp, whole, words } from "./format.js";
import { explained } from "./explain.js";
import { ask } from "./stream.js";
import { Table } from "./table.js";

const EXAMPLE = JSON.stringify({ messages: [{ role: "user", content: "Hello" }] }, null, 2);

export class Decisions {
  #model = null;
  #selected = null;
  #isPaused = false;

  constructor() {
    this.pause = h(
      "button",
      {
        type: "button",
        "aria-pressed": "false",
        on: {
          click: () => {
            this.#isPaused = !this.#isPaused;
            this.pause.setAttribute("aria-pressed", String(this.#isPaused));
            setText(this.pause, this.#isPaused ? "Go on" : "Pause");
            this.render(this.#model);
          },
        },
      },
      "Pause",
    );
    const number = (key, title, format) => ({ key, title, number: true, text: (row) => format(row[key] ?? null), value: (row) => row[key] });
    const share = (tokens, row) => (row.prompt_tokens > 0 ? percent(Math.min(1, (tokens ?? 0) / row.prompt_tokens)) : "–");
    this.table = new Table({
      label: "Decisions",
      unit: "decision",
      sort: "number",
      descending: true,
      key: (row) => row.number,
      search: (row) => `${row.model} ${row.chosen} ${row.prefill ?? ""} ${words(row.reason ?? "")} ${row.reason} ${row.policy}`,
      state: (row) => (row.number === this.#selected ? "selected" : ""),
      onSelect: (row) => this.select(row.number),
      controls: [this.pause],
      columns: [
        { key: "number", title: "Time", metric: "at_unix_ms of /dashboard/decision, in UTC as in the log", value: (row) => row.number, number: true, text: (row) => clock(row.at) },
        { key: "chosen", title: "Worker", metric: "chosen of /explain", text: (row) => (row.prefill ? `${row.prefill} → ${row.chosen}` : (row.chosen ?? "none")) },
        { key: "reason", title: "Reason", metric: "warmroute_routing_decisions_total", text: (row) => words(row.reason ?? "") },
        { ...number("prompt_tokens", "Prompt", (value) => amount(value, "token")), metric: "warmroute_routed_prompt_tokens_total" },
        { key: "cached_tokens", title: "Cached", metric: "warmroute_expected_cached_prompt_tokens_total", number: true, value: (row) => row.cached_tokens, text: (row) => share(row.cached_tokens, row) },
        { key: "longest_tokens", title: "Best cached", metric: "longest_cached_tokens of /dashboard/decision: the longest cached prefix of any candidate", number: true, value: (row) => row.longest_tokens, text: (row) => share(row.longest_tokens, row) },
        { ...number("cost", "Cost", (value) => seconds(value === null ? null : value / 1000)), metric: "cost_ms of /explain: what the request costs there, its own time and what it takes from others" },
        { ...number("candidates", "Candidates", whole), metric: "candidates of /explain" },
        { key: "model", title: "Model", text: (row) => row.model },
      ],
    });
    this.result = h("div", { id: "explanation", class: "detail", "aria-live": "polite" }, empty("Choose a decision to see its candidates as they were."));
    this.form = this.#form();
    this.element = h(
      "section",
      { id: "decisions", class: "part", "aria-labelledby": "decisions-title" },
      h("h2", { id: "decisions-title" }, "Decisions"),
      card("explain", "Why", this.result),
      h(
        "div",
        { class: "grid decisions" },
        card("tail", "Latest decisions (a sample)", this.table.element, h("p", { class: "note" }, "Up to 5 decisions a second while a dashboard is open. No prompt text is kept.")),
        card("paste", "Explain a request", this.form),
      ),
    );
  }

  #form() {
    const path = h("select", { id: "explain-path" }, ["/v1/chat/completions", "/v1/completions", "/v1/responses"].map((value) => h("option", { value }, value)));
    const body = h("textarea", { id: "explain-body", rows: "9", spellcheck: "false", autocomplete: "off" });
    body.value = EXAMPLE;
    const button = h("button", { type: "submit", class: "primary" }, "Explain");
    const submit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      try {
        JSON.parse(body.value);
        const answer = await ask(`explain?path=${encodeURIComponent(path.value)}`, { method: "POST", headers: { "content-type": "application/json" }, body: body.value });
        this.#selected = null;
        this.#show(explained(answer), "Now, for the pasted request");
      } catch (error) {
        this.#show(h("p", { class: "problem", role: "alert" }, error.message), "The pasted request");
      } finally {
        button.disabled = false;
      }
    };
    return h(
      "form",
      { class: "stack", on: { submit } },
      h("label", { for: "explain-path" }, "Path"),
      path,
      h("label", { for: "explain-body" }, "Body (JSON)"),
      body,
      h("div", { class: "buttons" }, h("span", { class: "quiet" }, "A dry run: nothing is sent to a worker. Needs the role operate."), button),
    );
  }

  render(model) {
    if (!model) return;
    this.#model = model;
    if (!this.#isPaused) this.table.rows = model.decisions;
    else this.table.render();
  }

  async select(number) {
    this.#selected = number;
    this.table.render();
    try {
      const decision = await ask(`dashboard/decision?number=${number}`);
      if (this.#selected === number) this.#show(explained(decision), `As it was decided at ${timestamp(decision.at_unix_ms)}`);
    } catch (error) {
      this.#show(h("p", { class: "problem" }, error.message), `Decision ${whole(number)}`);
    }
  }

  #show(content, title) {
    this.result.replaceChildren(h("p", { class: "quiet" }, title), content);
    const isSeen = this.result.getBoundingClientRect().top > 0;
    const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
    if (!isSeen) this.result.scrollIntoView({ block: "nearest", behavior });
  }
}
