// Charts over time, by uPlot. Colours come from the style sheet; the text beside each line has its last value, which is
// also what screen readers get.

import { h, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";
import { RANGE_MS } from "./model.js";

const HEIGHT = 168;
const MIN_RANGE_MS = 60_000;
/** Of lines with the same colour: what they mean is alike. */
const DASHES = { dashed: [5, 4], dotted: [1.5, 3] };
const charts = new Set();
/** The same time under the pointer in all charts. */
const sync = () => window.uPlot.sync("warmroute");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** New colours, after a change of the theme. */
export function recolour() {
  for (const chart of charts) chart.build();
}

/** Vertical lines with a text at moments: {at (seconds), text}. */
let marks = [];
export function setMarks(next) {
  marks = next;
}

function drawMarks(plot, withText) {
  const { ctx, bbox } = plot;
  const scale = window.devicePixelRatio || 1;
  // Where each line of labels is free; labels that do not fit into the first go into the second.
  const free = [bbox.left, bbox.left];
  ctx.save();
  ctx.font = `${10 * scale}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.lineWidth = scale;
  ctx.setLineDash([3 * scale, 3 * scale]);
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colour(mark.kind === "down" ? "bad" : "text");
    ctx.fillStyle = ctx.strokeStyle;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const width = ctx.measureText(mark.text).width + 6 * scale;
    const start = x + width < bbox.left + bbox.width ? x : x - width;
    const line = free.findIndex((end) => start >= end);
    if (withText && mark.text && line >= 0) {
      ctx.textAlign = "left";
      ctx.fillText(mark.text, start + 4 * scale, bbox.top + (2 + 12 * line) * scale);
      free[line] = start + width;
    }
  }
  ctx.restore();
}

/**
 * `lines`: {key, label, colour, metric, fill?, dash?}. `format(value)`: a value as text.
 */
export class Chart {
  #options;
  #plot = null;
  #data = null;
  #values = new Map();

  constructor(options) {
    this.#options = options;
    this.canvas = h("div", { class: "chart", role: "img", "aria-label": options.title });
    this.legend = h(
      "ul",
      { class: "legend" },
      options.lines.map((line) => {
        const value = h("b", { class: "value" }, "–");
        const item = h(
          "li",
          { title: line.metric, "data-metric": line.metric.split(" ")[0] },
          h("i", { class: `swatch ${line.colour}${line.dash ? ` ${line.dash}` : ""}`, "aria-hidden": "true" }),
          line.label,
          " ",
          value,
        );
        this.#values.set(line.key, { value, item });
        return item;
      }),
    );
    this.blank = h("p", { class: "empty over" }, options.blank ?? "No requests in the last 15 minutes");
    this.element = h("div", { class: "chartbox" }, this.legend, h("div", { class: "plot" }, this.canvas, this.blank));
    charts.add(this);
    new ResizeObserver(() => this.#resize()).observe(this.canvas);
  }

  #resize() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (!this.#plot) this.build();
    else if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT });
    this.#settle();
  }

  /** A list where the last name would be alone on a line. */
  #settle() {
    this.legend.classList.remove("stacked");
    const lines = [...this.legend.children].filter((item) => !item.hidden).map((item) => item.offsetTop);
    const isAlone = lines.at(-1) !== lines[0] && lines.filter((line) => line === lines.at(-1)).length === 1;
    this.legend.classList.toggle("stacked", isAlone);
  }

  build() {
    const width = this.canvas.clientWidth;
    if (!width || !window.uPlot) return;
    this.#plot?.destroy();
    const { lines, format, max, marked } = this.#options;
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.#plot = new window.uPlot(
      {
        width,
        height: HEIGHT,
        // Room for half of the last label of time.
        padding: [10, 26, 0, 0],
        legend: { show: false },
        // Round times in UTC, whatever the browser's zone is.
        tzDate: (seconds) => window.uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        cursor: { sync: { key: sync().key }, drag: { x: false, y: false }, points: { size: 6 }, y: false },
        scales: {
          x: { time: true, range: () => this.#range() },
          y: { range: (_, low, high) => [0, max ?? Math.max(high * 1.15, this.#options.least ?? 1)] },
        },
        axes: [
          { ...axis, size: 26, space: 80, values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick * 1000, step < 60)) },
          { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map((tick) => (this.#options.axis ?? format)(tick)) },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.label,
            stroke: colour(line.colour),
            width: 1.75,
            fill: line.fill ? `${colour(line.colour)}22` : undefined,
            dash: DASHES[line.dash],
            points: { show: false },
            spanGaps: Boolean(line.spans),
          })),
        ],
        hooks: { draw: [(plot) => drawMarks(plot, marked)], setCursor: [(plot) => this.#show(plot.cursor.idx)] },
      },
      this.#data ?? [[], ...lines.map(() => [])],
      this.canvas,
    );
  }

  /** From the first sample on, but no less than a minute; by the router's clock, which may differ from the browser's. */
  #range() {
    const times = this.#data?.[0] ?? [];
    const now = times.at(-1) ?? Date.now() / 1000;
    const first = times[0] ?? now;
    return [Math.max(Math.min(first, now - MIN_RANGE_MS / 1000), now - RANGE_MS / 1000), now];
  }

  /** `values`: a list for each line's key. */
  update(times, values) {
    const { lines, title, format, marked } = this.#options;
    this.#data = [times, ...lines.map((line) => values[line.key] ?? [])];
    const isBlank = this.#data.slice(1).every((line) => line.every((value) => !value));
    this.blank.hidden = !isBlank;
    for (const line of lines.filter((it) => it.optional)) {
      const { item } = this.#values.get(line.key);
      const isHidden = (values[line.key] ?? []).every((value) => !value);
      if (item.hidden !== isHidden) {
        item.hidden = isHidden;
        this.#settle();
      }
    }
    if (!this.#plot) this.#resize();
    this.#plot?.setData(this.#data);
    this.#show(this.#plot?.cursor.idx);
    const now = lines.map((line) => `${line.label} ${format(last(values[line.key]))}`);
    const changes = marked ? marks.filter((mark) => mark.text).map((mark) => `; ${mark.text} from ${clock(mark.at * 1000)}`) : [];
    setAttribute(this.canvas, "aria-label", `${title}, now: ${now.join(", ")}${changes.join("")}`);
  }

  #show(index) {
    const { lines, format } = this.#options;
    lines.forEach((line, at) => {
      const list = this.#data?.[at + 1] ?? [];
      const isPast = index !== null && index !== undefined && index < list.length;
      setText(this.#values.get(line.key).value, format(isPast ? list[index] : last(list, line.spans)));
    });
  }
}

/** The last value; the last one that there is, if a line spans gaps. */
function last(list, spans) {
  if (!list || list.length === 0) return null;
  return spans ? (list.findLast((value) => value !== null) ?? null) : list.at(-1);
}
