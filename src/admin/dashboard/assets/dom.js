// Elements. Text goes in as text only: a worker that is called <script> shows as that.

/** Makes an element: attributes, then children (elements or texts). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "class") {
      element.className = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Sets an element's text if it differs, so that screen readers and layout have no work for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** A width in percent, by the style object: the page's policy allows no style attributes. */
export function setWidth(element, share) {
  const width = `${(Math.max(0, Math.min(1, share)) * 100).toFixed(1)}%`;
  if (element.style.width !== width) element.style.width = width;
}

/** What a number is called in /metrics, as a tooltip and for screen readers. */
export function metric(element, ...names) {
  const text = names.join(" / ");
  element.setAttribute("title", text);
  element.setAttribute("data-metric", names[0]);
  return element;
}

/** What may be wider than the page. What lies beyond the edge is faded, so that no number looks whole that is cut. */
export function scroller(label, ...children) {
  const element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
  const mark = () => element.classList.toggle("cut", element.scrollWidth - element.clientWidth - element.scrollLeft > 1);
  element.addEventListener("scroll", mark, { passive: true });
  const sizes = new ResizeObserver(mark);
  sizes.observe(element);
  for (const child of element.children) sizes.observe(child);
  return element;
}

export function card(id, title, ...children) {
  const heading = h("h3", { id: `${id}-title` }, title);
  return h("section", { class: "card", id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}
