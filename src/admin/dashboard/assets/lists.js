// Small lists of numbers, each with the name of its metric.

import { h, metric } from "./dom.js";
import { amount, count, seconds, words } from "./format.js";

export function facts(...lines) {
  return h("dl", { class: "facts" }, lines.flat());
}

export function line(title, value, ...names) {
  const text = h("dd", {}, value);
  return [h("dt", {}, title), names.length > 0 ? metric(text, ...names) : text];
}

/** Counts of a unit by a label's value, the largest first. `names`: labels in plainer words. */
export function byLabel(values, name, unit, names = {}) {
  const entries = Object.entries(values ?? {}).filter(([, value]) => value > 0);
  if (entries.length === 0) return [h("p", { class: "empty" }, "None yet.")];
  const rows = entries.sort((a, b) => b[1] - a[1]).map(([label, value]) => h("li", { title: name }, h("span", {}, names[label] ?? words(label)), h("b", { class: "value" }, unit ? amount(value, unit) : count(value))));
  return [h("ul", { class: "tally" }, rows)];
}

/** Means of a histogram by a label: {label: [count, sum]}. */
export function means(values, name, names = {}) {
  const entries = Object.entries(values ?? {}).filter(([, [number]]) => number > 0);
  if (entries.length === 0) return [h("p", { class: "empty" }, "None yet.")];
  const rows = entries.map(([label, [number, sum]]) => h("li", { title: name }, h("span", {}, names[label] ?? words(label)), h("span", { class: "quiet" }, `${count(number)} ×`), h("b", { class: "value" }, seconds(sum / number))));
  return [h("ul", { class: "tally" }, rows)];
}
