// Errors and tolerances along the depth of the model: a panel for each part of a step, all with the same axis.

const PANELS = [
  ["Activations", ["batch", "input", "output", "loss", "decision", "call", "buffer", "recompute_input", "recompute_output"]],
  ["Activation gradients", ["grad_output", "grad_input"]],
  ["Weight gradients", ["param_grad", "main_grad", "grad_norm", "clip"]],
  ["Updates", ["param", "update", "param_after", "optim", "buffer_after"]],
];
const MEASURES = {
  error: ["Error", (i) => Math.max(tensors.error[i], tensors.replicas[i]), (i) => tensors.tolerance[i]],
  replicas: ["Replicas", (i) => tensors.replicas[i], (i) => tensors.tolerance[i]],
  scale: ["Scale", (i) => Math.abs(tensors.scale[i]), (i) => tensors.scale_tolerance[i]],
};
const LOWEST = 1e-3; // of an epsilon: smaller errors are drawn here, but exact zeros in a row of their own
const NEAR = 12; // pixels around the pointer
const WIDE = 700; // pixels: narrower panels have no room for labels beside them
const plots = [];
let measure = "error", firstAt;

function makePlots() {
  const holder = el("div", { class: "panels" });
  const choices = Object.entries(MEASURES).map(([name, [label]]) => makeChoice(name, label, () => draw(holder)));
  const legend = el("p", { class: "legend" },
    makeMark("pass", "■"), " passes  ", makeMark("wrong", "◆"), " wrong  ", makeMark("open", "○"), " not judged  ",
    el("span", { class: "line" }), " tolerance",
    page.findings.length ? ["  ", el("span", { class: "line first" }), " first wrong tensor"] : null);
  makeLazily(holder, () => draw(holder));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(holder));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    plots.forEach((plot) => plot.setSize({ width: plot.root.parentNode.clientWidth, height: plot.height }));
  });
  return makeSection(
    "Along the depth of the model",
    `In units of ε = ${format(epsilon)}${page.precision.name ? ` (${page.precision.name})` : ""}, in the order of the ` +
      "forward pass: gradients flow from right to left. Drag to zoom, double-click to zoom out, click a mark for details.",
    el("div", { class: "bar" }, el("div", { class: "choices", role: "radiogroup" }, choices), legend),
    holder,
  );
}

function makeChoice(name, label, redraw) {
  const input = el("input", { type: "radio", name: "measure", checked: name === measure, onchange: () => {
    measure = name;
    redraw();
  } });
  return el("label", {}, input, label);
}

function draw(holder) {
  plots.splice(0).forEach((plot) => plot.destroy());
  holder.replaceChildren();
  const scale = chooseScale();
  const panels = PANELS.map(([title, kinds]) => ({ title, rows: findRows(kinds) })).filter(({ rows }) => rows.length);
  panels.forEach((panel) => (panel.xs = spreadPositions(panel.rows)));
  firstAt = findFirst(panels);
  for (const { title, rows, xs } of panels) {
    const panel = el("figure", {}, el("figcaption", {}, `${title} `, el("span", {}, plural(rows.length, "tensor"))));
    holder.append(panel);
    plots.push(makePlot(panel, rows, xs, scale));
  }
}

// Where the first wrong tensor is drawn.
function findFirst(panels) {
  if (!page.findings.length) return undefined;
  const first = indexOf(page.findings[0].id);
  for (const { rows, xs } of panels) {
    const at = rows.indexOf(first);
    if (at >= 0) return xs[at];
  }
  return tensors.place[first];
}

const isMeasured = (i) => !Number.isNaN(MEASURES[measure][1](i));

function findRows(kinds) {
  const wanted = new Set(kinds.map((kind) => tensors.kind.words.indexOf(kind)));
  const rows = [];
  for (let i = 0; i < tensors.count; i++) if (wanted.has(tensors.kind.at[i]) && isMeasured(i)) rows.push(i);
  return rows.sort((a, b) => tensors.place[a] - tensors.place[b] || a - b);
}

// Whole decades, the same for all panels, and a row below them for exact zeros, which have no logarithm.
function chooseScale() {
  let low = 1, high = 10, hasZeros = false;
  for (let i = 0; i < tensors.count; i++) {
    for (const value of [MEASURES[measure][1](i) / epsilon, MEASURES[measure][2](i) / epsilon]) {
      if (value > 0 && value < low) low = Math.max(value, LOWEST);
      if (Number.isFinite(value) && value > high) high = value;
    }
    hasZeros ||= MEASURES[measure][1](i) === 0;
  }
  low = 10 ** Math.floor(Math.log10(low) - 0.2);
  high = 10 ** Math.ceil(Math.log10(high) + 0.2);
  const gap = (high / low) ** 0.14; // 14 % of the height
  const zero = low / gap;
  return { low, high, zero, bottom: hasZeros ? zero / gap ** 0.5 : low, hasZeros };
}

// Tensors that share a place are spread over it, so that each has its own x.
function spreadPositions(rows) {
  const counts = new Map();
  for (const i of rows) counts.set(tensors.place[i], (counts.get(tensors.place[i]) || 0) + 1);
  const seen = new Map();
  return rows.map((i) => {
    const place = tensors.place[i], at = seen.get(place) || 0;
    seen.set(place, at + 1);
    return place + (at + 0.5) / counts.get(place) - 0.5;
  });
}

function makePlot(panel, rows, xs, { low, high, zero, bottom, hasZeros }) {
  const [, value, tolerance] = MEASURES[measure];
  const height = (number) => (number === 0 ? zero : Math.min(Math.max(number / epsilon, low), high));
  const whole = [-0.6, page.places.length - 0.4];
  const lines = collectTolerances(rows, xs, (i) => (tolerance(i) > 0 && Number.isFinite(tolerance(i)) ? height(tolerance(i)) : null));
  const byState = STATES.map((state) => rows.map((i) => (stateOf(i) === state ? height(value(i)) : null)));
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const many = rows.length > 4000;
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const tip = el("div", { class: "tip", hidden: true });
  const ticks = [...(hasZeros ? [zero] : []), ...chooseDecades(low, high)];
  const made = new uPlot(
    {
      width: panel.clientWidth,
      height: 190,
      padding: [null, (u) => (u.width > WIDE ? 110 : 8), null, null], // the same in all panels: they share one axis
      legend: { show: false },
      cursor: { sync: { key: "depth", setSeries: false, scales: ["x", null] }, points: { show: false }, y: false,
        drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, from, to) => (from === xs[0] && to === xs.at(-1) ? whole : [from, to]) },
        y: { distr: 3, range: [bottom, high] } },
      axes: [
        { ...axis, grid: { show: false }, space: 90, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5],
          values: (_, splits) => makeLabels(splits) },
        { ...axis, size: 52, splits: () => ticks, filter: (_, splits) => splits,
          values: (_, splits) => splits.map((at) => (hasZeros && at === zero ? "0" : formatDecade(at))) },
      ],
      series: [
        {},
        { ...chooseMarks(dot, many ? 2 : 5), ...paint(colour("pass"), true) },
        { ...chooseMarks(diamond, 8), ...paint(colour("wrong"), true) },
        { ...chooseMarks(ring, many ? 4 : 6), ...paint(colour("open"), false) },
      ].map(({ pointPaths, ...series }) => (pointPaths ? addPoints(series, pointPaths) : series)),
      hooks: {
        drawAxes: [(u) => drawTolerances(u, lines, colour), (u) => drawFirst(u, colour("wrong"))],
        setCursor: [(u) => showTip(u, tip, rows, xs, value)],
        ready: [(u) => {
          u.over.append(tip);
          u.over.addEventListener("click", () => u.nearest !== undefined && showCard(u.nearest));
        }],
      },
    },
    [xs, ...byState],
    panel,
  );
  return Object.assign(made, { lines, zero });
}

// A line for each kind, and for each state of an optimizer. Their tolerances are orders of magnitude apart: one line
// through all of them would jump up and down.
function collectTolerances(rows, xs, limit) {
  const lines = new Map();
  rows.forEach((i, k) => {
    const y = limit(i);
    if (y === null) return;
    const kind = word("kind", i) === "optim" ? kindOf(i) : word("kind", i);
    if (!lines.has(kind)) lines.set(kind, []);
    lines.get(kind).push([xs[k], y]);
  });
  return lines;
}

function drawTolerances(u, lines, colour) {
  const { ctx, bbox } = u, labels = [];
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = colour("fg");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const [kind, points] of lines) {
    const at = points.map(([x, y]) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)]);
    // A line of one point would not be seen.
    if (at.length === 1) at.splice(0, 1, ...[-10, 10].map((dx) => [at[0][0] + dx * devicePixelRatio, at[0][1]]));
    ctx.beginPath();
    at.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
    ctx.stroke();
    const last = at.findLast(([x]) => x <= bbox.left + bbox.width);
    if (last) labels.push([kind, last[1]]);
  }
  ctx.restore();
  if (u.width > WIDE) drawLabels(u, labels, colour("muted"));
}

// The kinds beside the ends of their lines; those that would cover each other stand below each other.
function drawLabels(u, labels, colour) {
  const { ctx, bbox } = u, step = 11 * devicePixelRatio, x = bbox.left + bbox.width + 8 * devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui`;
  [ctx.textAlign, ctx.textBaseline] = ["left", "middle"];
  ctx.fillStyle = colour;
  const groups = [];
  for (const [kind, y] of labels.sort((a, b) => a[1] - b[1])) {
    let last = { kinds: [kind], y };
    while (groups.length && last.y - groups.at(-1).y < (step * (last.kinds.length + groups.at(-1).kinds.length)) / 2) {
      const { kinds, y: above } = groups.pop(), total = kinds.length + last.kinds.length;
      last = { kinds: [...kinds, ...last.kinds], y: (above * kinds.length + last.y * last.kinds.length) / total };
    }
    groups.push(last);
  }
  for (const { kinds, y } of groups) {
    kinds.forEach((kind, k) => ctx.fillText(kind, x, y + (k - (kinds.length - 1) / 2) * step));
  }
  ctx.restore();
}

// Where the first wrong tensor is.
function drawFirst(u, colour) {
  if (firstAt === undefined || firstAt < u.scales.x.min || firstAt > u.scales.x.max) return;
  const x = Math.round(u.valToPos(firstAt, "x", true)) + 0.5;
  u.ctx.save();
  u.ctx.strokeStyle = colour;
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.restore();
}

const paint = (colour, filled) => ({ colour, filled });
const chooseMarks = (shape, size) => ({ pointPaths: [shape, size] });

function addPoints({ colour, filled }, [shape, size]) {
  const paths = (u, series, from, to) => {
    const path = new Path2D(), radius = (size * devicePixelRatio) / 2;
    const [xs, ys] = [u.data[0], u.data[series]];
    for (let i = from; i <= to; i++) {
      if (ys[i] !== null) shape(path, u.valToPos(xs[i], "x", true), u.valToPos(ys[i], "y", true), radius);
    }
    return { stroke: path, fill: filled ? path : null, clip: null, flags: 3 };
  };
  return { paths: () => null, stroke: colour,
    points: { show: true, paths, stroke: colour, fill: filled ? colour : undefined, width: filled ? 0.5 : 1.25 } };
}

const dot = (path, x, y, r) => path.rect(x - r, y - r, 2 * r, 2 * r);
function diamond(path, x, y, r) {
  path.moveTo(x, y - r);
  for (const [dx, dy] of [[r, 0], [0, r], [-r, 0], [0, -r]]) path.lineTo(x + dx, y + dy);
}
function ring(path, x, y, r) {
  path.moveTo(x + r, y);
  path.arc(x, y, r, 0, 2 * Math.PI);
}

// At most six lines, each at a power of ten.
function chooseDecades(low, high) {
  const [from, to] = [Math.round(Math.log10(low)), Math.round(Math.log10(high))];
  const step = Math.ceil((to - from) / 6), values = [];
  for (let power = Math.ceil(from / step) * step; power <= to; power += step) values.push(10 ** power);
  return values;
}

function formatDecade(value) {
  const power = Math.round(Math.log10(value));
  return Math.abs(power) < 3 ? String(value) : `1e${power}`;
}

// The layer at each tick, unless it is the same as at the tick before.
function makeLabels(splits) {
  let last;
  return splits.map((at) => {
    const name = page.places[Math.round(at)];
    const label = name === undefined ? "" : name === "." || name === "" ? page.root : layer(name);
    if (label === last) return "";
    last = label;
    return label.length > 16 ? `…${label.slice(-15)}` : label;
  });
}

const layer = (name) => name.match(/^.*?\d+(?=\.|$)/)?.[0] || name;

// The mark nearest to the pointer.
function showTip(u, tip, rows, xs, value) {
  u.nearest = undefined;
  tip.hidden = true;
  const { left, top } = u.cursor;
  if (left < 0 || top < 0 || !u.over.matches(":hover")) return;
  let best = NEAR ** 2;
  const from = findFirstIndex(xs, u.posToVal(left - NEAR, "x")), to = findFirstIndex(xs, u.posToVal(left + NEAR, "x"));
  for (let k = from; k < to; k++) {
    const y = u.data[1][k] ?? u.data[2][k] ?? u.data[3][k];
    const away = (u.valToPos(xs[k], "x") - left) ** 2 + (u.valToPos(y, "y") - top) ** 2;
    if (away < best) [best, u.nearest] = [away, rows[k]];
  }
  if (u.nearest === undefined) return;
  tip.textContent = `${SYMBOLS[word("verdict", u.nearest)]} ${idOf(u.nearest)}  ${inEpsilon(value(u.nearest))}`;
  tip.hidden = false;
  tip.style.top = top > 60 ? "4px" : "auto";
  tip.style.bottom = top > 60 ? "auto" : "4px";
}

function findFirstIndex(sorted, wanted) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
