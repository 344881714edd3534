// A table with search, sorting and pages: a thousand rows cost as much as one page of them.

import { h, scroller, setText } from "./dom.js";
import { whole } from "./format.js";

const PAGE = 12;
const TEXTS = new Intl.Collator("en", { numeric: true });

/**
 * `columns`: {key, title, metric?, number?, text(row), value?(row), cell?(row)}. `search(row)`: the text that is searched.
 */
export class Table {
  #rows = [];
  #sort;
  #descending;
  #page = 0;
  #query = "";
  #options;
  #body = h("tbody");
  #info = h("span", { class: "quiet", role: "status" });
  #heads = new Map();
  #cells = new Map();

  constructor(options) {
    this.#options = options;
    this.#sort = options.sort;
    this.#descending = options.descending ?? false;
    const head = h("tr", {}, options.columns.map((column) => this.#head(column)));
    const input = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": `Search ${options.label.toLowerCase()}`,
      on: {
        input: (event) => {
          this.#query = event.target.value.trim().toLowerCase();
          this.#page = 0;
          this.render();
        },
      },
    });
    this.search = input;
    const turn = (step) => () => {
      this.#page += step;
      this.render();
    };
    this.previous = h("button", { type: "button", class: "plain", "aria-label": "Previous page", on: { click: turn(-1) } }, "‹");
    this.next = h("button", { type: "button", class: "plain", "aria-label": "Next page", on: { click: turn(1) } }, "›");
    const table = h("table", {}, h("caption", { class: "unseen" }, options.label), h("thead", {}, head), this.#body);
    this.scroll = scroller(options.label, table);
    this.bar = h("div", { class: "bar" }, input, ...(options.controls ?? []), h("span", { class: "space" }), this.#info, this.previous, this.next);
    this.element = h("div", { class: "table" }, this.bar, this.scroll);
    this.#mark();
  }

  set query(text) {
    this.search.value = text;
    this.#query = text.toLowerCase();
    this.#page = 0;
  }

  #head(column) {
    const button = h(
      "button",
      {
        type: "button",
        class: "plain sort",
        title: column.metric ?? column.title,
        on: {
          click: () => {
            this.#descending = this.#sort === column.key ? !this.#descending : Boolean(column.number);
            this.#sort = column.key;
            this.#mark();
            this.render();
          },
        },
      },
      column.title,
    );
    const head = h("th", { scope: "col", class: column.number ? "number" : "" }, button);
    this.#heads.set(column.key, head);
    return head;
  }

  #mark() {
    for (const [key, head] of this.#heads) {
      head.setAttribute("aria-sort", key !== this.#sort ? "none" : this.#descending ? "descending" : "ascending");
    }
  }

  set rows(rows) {
    this.#rows = rows;
    this.render();
  }

  render() {
    const { columns, search, key, onSelect } = this.#options;
    const found = this.#query ? this.#rows.filter((row) => search(row).toLowerCase().includes(this.#query)) : [...this.#rows];
    const column = columns.find((it) => it.key === this.#sort);
    if (column) {
      const value = column.value ?? column.text;
      const compare = (a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === right) return TEXTS.compare(key(a), key(b));
        if (left === null || left === undefined) return 1;
        if (right === null || right === undefined) return -1;
        const order = typeof left === "number" ? left - right : TEXTS.compare(left, right);
        return this.#descending ? -order : order;
      };
      found.sort(compare);
    }
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.#page = Math.max(0, Math.min(this.#page, pages - 1));
    const shown = found.slice(this.#page * PAGE, (this.#page + 1) * PAGE);
    this.previous.disabled = this.#page === 0;
    this.next.disabled = this.#page >= pages - 1;
    this.previous.hidden = pages === 1;
    this.next.hidden = pages === 1;
    const from = found.length === 0 ? 0 : this.#page * PAGE + 1;
    const total = found.length === this.#rows.length ? whole(found.length) : `${whole(found.length)} (of ${whole(this.#rows.length)})`;
    setText(this.#info, pages === 1 ? total : `${whole(from)}–${whole(from + shown.length - 1)} of ${total}`);
    this.bar.hidden = this.#rows.length <= 8 && !this.#query && !this.#options.controls && !this.#options.alwaysSearch;
    const cells = new Map();
    const rows = shown.map((row) => {
      const id = key(row);
      const old = this.#cells.get(id);
      const kept = old ?? this.#row(row, onSelect);
      kept.update(row);
      cells.set(id, kept);
      return kept.element;
    });
    this.#cells = cells;
    const current = [...this.#body.children];
    if (rows.length !== current.length || rows.some((row, index) => row !== current[index])) {
      const focused = document.activeElement;
      this.#body.replaceChildren(...rows);
      if (focused && this.#body.contains(focused)) focused.focus({ preventScroll: true });
    }
  }

  /** A row that is kept while it is shown, so that focus and selection stay. */
  #row(first, onSelect) {
    let current = first;
    const parts = this.#options.columns.map((column, index) => {
      const cell = h(index === 0 ? "th" : "td", {
        scope: index === 0 ? "row" : null,
        class: column.number ? "number" : "",
        title: column.metric,
      });
      let target = cell;
      if (index === 0 && onSelect) {
        target = h("button", { type: "button", class: "link", on: { click: () => onSelect(current) } });
        cell.append(target);
      }
      return { column, cell, target };
    });
    const element = h("tr", {}, parts.map((part) => part.cell));
    if (onSelect) element.addEventListener("click", (event) => event.target.closest("button") ?? onSelect(current));
    return {
      element,
      update: (row) => {
        current = row;
        for (const { column, cell, target } of parts) {
          if (column.cell) column.cell(row, cell);
          else setText(target, column.text(row));
        }
        const state = this.#options.state?.(row) ?? "";
        if (element.className !== state) element.className = state;
      },
    };
  }
}
