// The page's data, and how numbers and verdicts are written.

const page = JSON.parse(document.getElementById("page").textContent);
const epsilon = page.precision.epsilon;

const SYMBOLS = { PASS: "✓", FAIL: "✗", CONFLICT: "≠", GAP: "◌", MISSING: "∅", UNJUDGED: "?" };
const STATE_SYMBOLS = { pass: "✓", wrong: "✗", open: "?" };
const RATIO = "error / tolerance";

function format(value) {
  if (Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e-2 && size < 1e4 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const inEpsilon = (value) => `${format(value / epsilon)} ε`;
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function makeMark(state, symbol) {
  return el("span", { class: `mark ${state}` }, symbol || STATE_SYMBOLS[state]);
}
