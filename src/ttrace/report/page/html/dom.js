"use strict";
// Elements. Texts come from traces and may be anything: they become only text nodes.

function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  return appendTo(element, children);
}

function appendTo(element, children) {
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function makeSection(title, lead, ...children) {
  return el("section", {}, el("h2", {}, title), lead ? el("p", { class: "lead" }, prose(lead)) : null, ...children);
}

// A sentence in which backticks mark code.
function prose(text) {
  return String(text).split(/`([^`]*)`/).map((part, k) => (k % 2 ? el("code", {}, part) : part));
}

function makeTable(heads, rows) {
  const cell = (tag, value) => el(tag, { class: typeof value === "number" ? "number" : undefined }, show(value));
  const show = (value) => (value instanceof Node ? value : value === null ? "not finite" : String(value));
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, heads.map((head) => cell("th", head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => cell("td", value))))),
    ),
  );
}

function makeCommand(text) {
  const button = el("button", { class: "copy", type: "button", onclick: copy }, "copy");
  const code = el("code", {}, text);
  function copy() {
    getSelection().selectAllChildren(code);
    navigator.clipboard?.writeText(text).then(() => (button.textContent = "copied"), () => {});
  }
  return el("div", { class: "command" }, code, button);
}

// Parts below the first screen are made when they are about to be seen.
function makeLazily(element, make) {
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      make();
    },
    { rootMargin: "400px" },
  );
  observer.observe(element);
  return element;
}
