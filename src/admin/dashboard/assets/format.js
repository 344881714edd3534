// Numbers as text. Always the same width for the same size, so that columns do not move. The space before a unit does not break:
// no unit begins a line.

const DASH = "–";

function isNone(value) {
  return value === null || value === undefined || Number.isNaN(value);
}

export function count(value) {
  if (isNone(value)) return DASH;
  const size = Math.abs(value);
  if (size < 10_000) return Math.round(value).toLocaleString("en");
  if (size < 1e6) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)}\u00a0k`;
  if (size < 1e9) return `${(value / 1e6).toFixed(1)}\u00a0M`;
  return `${(value / 1e9).toFixed(1)}\u00a0G`;
}

export function whole(value) {
  return isNone(value) ? DASH : Math.round(value).toLocaleString("en");
}

/** A number with its unit: 12 requests, 6,200 tokens. */
export function amount(value, unit, format = count) {
  if (isNone(value)) return DASH;
  return `${format(value)}\u00a0${unit}${Math.round(value) === 1 ? "" : "s"}`;
}

/** 1.2 /s, 340 tokens/s. */
export function perSecond(value, unit = "") {
  if (isNone(value)) return DASH;
  return `${unit ? count(value) : rate(value)}\u00a0${unit}/s`;
}

export function rate(value) {
  if (isNone(value)) return DASH;
  if (value < 10) return value.toFixed(1);
  return count(value);
}

export function percent(share, digits = 0) {
  if (isNone(share)) return DASH;
  return `${(share * 100).toFixed(digits)}\u00a0%`;
}

export function seconds(value) {
  if (isNone(value)) return DASH;
  if (value === 0) return "0\u00a0ms";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)}\u00a0µs`;
  if (value < 0.00995) return `${(value * 1e3).toFixed(1)}\u00a0ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)}\u00a0ms`;
  if (value < 100) return `${value.toFixed(2)}\u00a0s`;
  return `${value.toFixed(0)}\u00a0s`;
}

export function bytes(value) {
  if (isNone(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(1)}\u00a0${units[unit]}`;
}

export function ago(ms) {
  const passed = Math.max(0, Math.round(ms / 1000));
  if (passed < 60) return `${passed} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  return `${Math.floor(passed / 3600)} h ago`;
}

/** The time of day in UTC, as in the log. */
export function clock(ms, hasSeconds = true) {
  return `${new Date(ms).toISOString().slice(11, hasSeconds ? 19 : 16)}Z`;
}

/** The log's whole timestamp, as far as the page knows it. */
export function timestamp(ms) {
  return new Date(ms).toISOString();
}

export function words(name) {
  return name.replaceAll("_", " ");
}
