// A table with search, sorting and pages: a thousand rows cost as much as one page of them.

import { h, scroller, setText } from "./dom.js";
import { amount, whole } from "./format.js";

const PAGE = 12;
const TEXTS = new Intl.Collator("en", { numeric: true });

/**
 * `columns`: {key, title, metric?, number?, text(row), value?(row), cell?(row)}. `search(row)`: the text that is searched.
 * `unit`: what a row is. `ties`: by what rows are ordered that are equal in the chosen column, from the highest.
 * `folds`: {least, isIdle(row), isOn()}: rows of which nothing is to be said, as one line if there are that many.
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
  #isUnfolded = false;
  /** Rows stay where they are while the pointer is on them, so that a click meets what it was meant for. */
  #isHeld = false;
  #order = new Map();
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
    this.folded = h("span", { class: "quiet" });
    const turnFold = () => {
      this.#isUnfolded = !this.#isUnfolded;
      this.#page = 0;
      this.render();
    };
    this.unfold = h("button", { type: "button", on: { click: turnFold } }, "Show");
    this.fold = h("p", { class: "fold bar", hidden: true }, this.folded, this.unfold);
    this.element = h("div", { class: "table" }, this.bar, this.scroll, this.fold);
    if (options.folds) {
      this.#body.addEventListener("pointerenter", () => (this.#isHeld = true));
      this.#body.addEventListener("pointerleave", () => (this.#isHeld = false));
    }
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
            this.#order.clear();
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
    const matching = this.#query ? this.#rows.filter((row) => search(row).toLowerCase().includes(this.#query)) : [...this.#rows];
    const found = this.#withoutIdle(matching);
    const column = columns.find((it) => it.key === this.#sort);
    if (column) {
      const value = column.value ?? column.text;
      const compare = (a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === right) return this.#tie(a, b);
        if (left === null || left === undefined) return 1;
        if (right === null || right === undefined) return -1;
        const order = typeof left === "number" ? left - right : TEXTS.compare(left, right);
        return this.#descending ? -order : order;
      };
      found.sort(compare);
      if (this.#isHeld && this.#order.size > 0) found.sort((a, b) => (this.#order.get(key(a)) ?? Infinity) - (this.#order.get(key(b)) ?? Infinity) || 0);
      else this.#order = new Map(found.map((row, index) => [key(row), index]));
    }
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.#page = Math.max(0, Math.min(this.#page, pages - 1));
    const shown = found.slice(this.#page * PAGE, (this.#page + 1) * PAGE);
    this.previous.disabled = this.#page === 0;
    this.next.disabled = this.#page >= pages - 1;
    this.previous.hidden = pages === 1;
    this.next.hidden = pages === 1;
    const from = found.length === 0 ? 0 : this.#page * PAGE + 1;
    const { unit } = this.#options;
    const total = `${unit ? amount(found.length, unit, whole) : whole(found.length)}${found.length === this.#rows.length ? "" : ` (of ${whole(this.#rows.length)})`}`;
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

  /** Rows that are equal in the chosen column. */
  #tie(a, b) {
    for (const value of this.#options.ties ?? []) {
      const order = (value(b) ?? 0) - (value(a) ?? 0);
      if (order !== 0) return order;
    }
    return TEXTS.compare(this.#options.key(a), this.#options.key(b));
  }

  /** The rows without the idle ones, if those are folded: a search looks at all of them. */
  #withoutIdle(rows) {
    const { folds, unit } = this.#options;
    const isOn = folds && !this.#query && folds.isOn();
    const busy = isOn ? rows.filter((row) => !folds.isIdle(row)) : rows;
    const idle = rows.length - busy.length;
    this.fold.hidden = idle < (folds?.least ?? 1);
    if (this.fold.hidden) return rows;
    setText(this.folded, this.#isUnfolded ? `${amount(idle, `idle ${unit}`, whole)} among them` : amount(idle, `idle ${unit}`, whole));
    setText(this.unfold, this.#isUnfolded ? "Fold" : "Show");
    this.unfold.setAttribute("aria-label", `${this.#isUnfolded ? "Fold" : "Show"} idle ${unit}s`);
    return this.#isUnfolded ? rows : busy;
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
