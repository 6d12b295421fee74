// Where the error of a tensor is: a coarse map of the logical tensor for each rank that holds a part of it.

const STOPS = [[0, 32, 77], [42, 64, 108], [87, 93, 109], [124, 123, 120], [166, 157, 117], [211, 193, 100], [255, 233, 69]];
const DECADES = 4; // below the largest error

function makeMaps() {
  if (!page.maps.length) return null;
  const holder = el("div", { class: "maps" });
  makeLazily(holder, () => page.maps.forEach((each, k) => holder.append(makeFolded(each, k === 0))));
  return makeSection(
    "Where the error lies",
    "Columns are the last dim, rows all other dims. Each rank's part is at its place in the logical tensor. The error is " +
      "relative to the reference's root mean square.",
    holder,
  );
}

function makeFolded(each, isOpen) {
  const details = el("details", { open: isOpen, ontoggle: fillOnce },
    el("summary", {}, el("code", {}, each.id), ` [${each.shape.join(", ")}]`));
  function fillOnce() {
    if (details.open && details.children.length === 1) details.append(makeMap(each));
  }
  return details;
}

function makeMap({ of, ranks }) {
  const blocks = ranks.map((rank) => unpackNumbers(rank.blocks));
  const largest = Math.max(...blocks.flatMap((each) => [...each].filter(Number.isFinite)), 0) || 1;
  const caption = el("figcaption", {}, "\u00a0");
  const figures = ranks.map((rank, k) => makeRankMap(rank, blocks[k], largest, caption));
  const left = of > ranks.length ? el("p", { class: "lead" }, `and ${of - ranks.length} more parts`) : null;
  return el("figure", { class: "map" }, el("div", { class: "ranks" }, figures), left, makeScaleBar(largest), caption);
}

function makeRankMap(rank, blocks, largest, caption) {
  const width = blocks.length / rank.rows;
  const canvas = el("canvas", { width, height: rank.rows, role: "img",
    style: `aspect-ratio: ${Math.min(Math.max(width / rank.rows, 0.5), 4)}`, "aria-label": `error by block, ${rank.where}, region ${rank.region}` });
  const context = canvas.getContext("2d"), image = context.createImageData(width, rank.rows);
  blocks.forEach((value, k) => image.data.set(Number.isNaN(value) ? [0, 0, 0, 0] : [...shade(value, largest), 255], 4 * k));
  context.putImageData(image, 0, 0);
  canvas.addEventListener("mousemove", (event) => {
    const x = Math.floor((event.offsetX / canvas.clientWidth) * width);
    const y = Math.floor((event.offsetY / canvas.clientHeight) * rank.rows);
    const value = blocks[Math.min(Math.max(y, 0), rank.rows - 1) * width + Math.min(Math.max(x, 0), width - 1)];
    caption.textContent = `${rank.where}: ${Number.isNaN(value) ? "not held" : format(value)}`;
  });
  return el("div", {}, canvas, el("span", {}, rank.where), el("span", { class: "region" }, rank.region));
}

function shade(value, largest) {
  const part = value > 0 ? Math.min(Math.max(1 + Math.log10(value / largest) / DECADES, 0), 1) : 0;
  const at = part * (STOPS.length - 1), low = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[low].map((from, k) => Math.round(from + (STOPS[low + 1][k] - from) * (at - low)));
}

function makeScaleBar(largest) {
  const stops = STOPS.map((rgb) => `rgb(${rgb.join(" ")})`).join(", ");
  return el("p", { class: "scale" }, `≤ ${format(largest / 10 ** DECADES)} `,
    el("span", { style: `background: linear-gradient(90deg, ${stops})` }), ` ${format(largest)}`);
}
