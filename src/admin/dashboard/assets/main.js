// Puts the page together and keeps it up to date.

import { recolour } from "./charts.js";
import { Decisions } from "./decisions.js";
import { h, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { ago } from "./format.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { Panels } from "./panels.js";
import { connect, storedToken, storeToken } from "./stream.js";

const byId = (id) => document.getElementById(id);
const model = new Model();
const overview = new Overview();
const fleet = new Fleet();
const decisions = new Decisions();
const panels = new Panels();
const SECTIONS = [
  ["overview", "Overview"],
  ["fleet", "Fleet"],
  ["decisions", "Decisions"],
  ["kv", "KV events"],
  ["models", "Models"],
  ["parts", "More"],
];

let state = "connecting";
let detail = "";
let isDirty = false;

byId("view").append(overview.element, fleet.element, decisions.element, ...panels.elements);
byId("sections").append(...SECTIONS.map(([id, title], index) => h("a", { href: `#${id}`, "aria-keyshortcuts": String(index + 1) }, title)));

const connection = connect({
  onEvent(event, data) {
    model.apply(event, data);
    isDirty = true;
    requestAnimationFrame(render);
  },
  onState(next, text = "") {
    state = next;
    detail = text;
    if (next === "token") login(text);
    showState();
  },
});

function render() {
  if (!isDirty || !model.columns) return;
  isDirty = false;
  if (byId("view").hidden) {
    byId("view").hidden = false;
    setText(byId("version"), model.version);
    followHash();
  }
  overview.render(model);
  fleet.render(model);
  decisions.render(model);
  panels.render(model);
  for (const [index, link] of [...byId("sections").children].entries()) link.hidden = byId(SECTIONS[index][0]).hidden;
}

function showState() {
  const age = Date.now() - model.updatedAt;
  const isLate = state === "live" && age > 3_000;
  const since = model.updatedAt > 0 ? `last update ${ago(age)}` : "no data yet";
  const texts = { connecting: "connecting", live: isLate ? since : "live", lost: `disconnected, ${since}`, token: "needs a token", refused: detail };
  const element = byId("status");
  setText(element, texts[state]);
  element.className = `status ${isLate ? "lost" : state}`;
  element.title = detail;
  document.body.classList.toggle("stale", (state !== "live" || isLate) && model.updatedAt > 0);
}
setInterval(showState, 1_000);

function login(problem) {
  setText(byId("login-error"), problem);
  const dialog = byId("login");
  if (!dialog.open) dialog.showModal();
  byId("token").focus();
}

byId("login-form").addEventListener("submit", () => {
  storeToken(byId("token").value.trim());
  byId("token").value = "";
  connection.restart();
});
byId("login").addEventListener("cancel", (event) => storedToken() || event.preventDefault());

// The theme: as the system, light or dark. Kept for this browser.
const THEMES = ["system", "light", "dark"];
function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system" : theme}`);
  byId("theme").title = `Colours: ${theme === "system" ? "as the system" : theme}`;
  setText(byId("theme"), { system: "◐", light: "☀", dark: "☾" }[theme]);
  recolour();
}
function nextTheme() {
  const at = THEMES.indexOf(document.documentElement.dataset.theme ?? "system");
  const theme = THEMES[(at + 1) % THEMES.length];
  localStorage.setItem("warmroute-theme", theme);
  applyTheme(theme);
}
applyTheme(THEMES.includes(localStorage.getItem("warmroute-theme")) ? localStorage.getItem("warmroute-theme") : "system");
byId("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

const SHORTCUTS = {
  "1 – 6": "go to a section",
  "/": "search workers",
  "e": "explain a request",
  "p": "pause or go on with the decisions",
  "t": "change the colours",
  "← → ↑ ↓": "move in the fleet's map",
  "Esc": "leave a field",
  "?": "these shortcuts",
};
byId("shortcuts").append(...Object.entries(SHORTCUTS).flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]));
byId("keys").addEventListener("click", () => byId("help").showModal());

function go(id) {
  const target = byId(id);
  if (!target || target.hidden) return;
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
  target.scrollIntoView({ block: "start", behavior });
  target.tabIndex = -1;
  target.focus({ preventScroll: true });
}

function followHash() {
  const id = location.hash.slice(1);
  if (SECTIONS.some(([known]) => known === id)) byId(id).scrollIntoView({ block: "start" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") document.activeElement?.blur();
  if (event.target.closest("input, textarea, select")) return;
  const section = SECTIONS[Number(event.key) - 1];
  const focus = (element) => {
    event.preventDefault();
    element.scrollIntoView({ block: "center" });
    element.focus();
  };
  if (section) go(section[0]);
  else if (event.key === "/") focus(byId("fleet-search"));
  else if (event.key === "e") focus(byId("explain-body"));
  else if (event.key === "p") decisions.pause.click();
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") byId("help").showModal();
});
