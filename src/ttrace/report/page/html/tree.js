// The module tree. Rows are made when their parent is opened.

const MOST_CHILDREN = 100;

function makeTree() {
  const heads = el("div", { class: "heads" }, el("span", { class: "label" }, "module"), el("span", {}, RATIO));
  const holder = el("div", { class: "tree" }, heads, makeBranch(growTree(), findFirstPath(), true));
  return makeSection("Modules", "Each module has the mark and the ratio of the worst tensor inside it.", holder);
}

function makeNode(label) {
  return { label, children: new Map(), rows: [], counts: { pass: 0, wrong: 0, open: 0 }, worst: 0 };
}

function growTree() {
  const root = makeNode(page.root), byName = new Map();
  page.places.forEach((name) => pathTo(root, name)); // modules in the order of the forward pass
  for (let i = 0; i < tensors.count; i++) {
    const at = tensors.name.at[i];
    if (!byName.has(at)) byName.set(at, pathTo(root, tensors.name.words[at]));
    const path = byName.get(at), state = stateOf(i), worst = ratioOf(i);
    path[path.length - 1].rows.push(i);
    for (const each of path) {
      each.counts[state] += 1;
      if (worst > each.worst) each.worst = worst;
    }
  }
  return root;
}

function pathTo(root, name) {
  const path = [root];
  if (name === "." || name === "") return path;
  for (const part of name.split(".")) {
    const last = path[path.length - 1];
    if (!last.children.has(part)) last.children.set(part, makeNode(part));
    path.push(last.children.get(part));
  }
  return path;
}

function findFirstPath() {
  const [finding] = page.findings;
  if (!finding) return [page.root];
  const name = finding.id.split("/")[2].split("@")[0];
  return [page.root, ...(name === "." ? [] : name.split("."))];
}

const stateOfNode = ({ counts }) => (counts.wrong ? "wrong" : counts.pass ? "pass" : "open");

function fillNode(parent, holder, target) {
  const rows = [...parent.children.values()].map((child) => () => makeBranch(child, target));
  rows.push(...parent.rows.map((i) => () => makeLeaf(i)));
  addMore(holder, rows, 0, target);
}

function addMore(holder, rows, from, target) {
  const to = Math.min(from + MOST_CHILDREN, rows.length);
  for (const make of rows.slice(from, to)) holder.append(make());
  if (to === rows.length) return;
  const button = el("button", { class: "more", type: "button" }, `${(rows.length - to).toLocaleString("en")} more`);
  button.addEventListener("click", () => {
    button.remove();
    addMore(holder, rows, to, target);
  });
  holder.append(button);
}

function makeBranch(child, target, isOpen = false) {
  const isTarget = target.length > 0 && child.label === target[0];
  const inside = el("div", { class: "inside", hidden: true });
  const { counts, worst } = child;
  const total = counts.pass + counts.wrong + counts.open;
  const words = counts.wrong ? `${counts.wrong.toLocaleString("en")} of ${plural(total, "tensor")} wrong` : plural(total, "tensor");
  const row = el("button", { class: "row", type: "button", "aria-expanded": "false", onclick: toggle },
    el("span", { class: "arrow" }, "▸"), makeMark(stateOfNode(child)), el("span", { class: "label" }, child.label),
    el("span", { class: "words" }, words), makeMeter(worst));
  let isMade = false;
  function toggle() {
    if (!isMade) fillNode(child, inside, isTarget ? target.slice(1) : []);
    isMade = true;
    inside.hidden = !inside.hidden;
    row.setAttribute("aria-expanded", String(!inside.hidden));
    row.firstChild.textContent = inside.hidden ? "▸" : "▾";
  }
  if (isTarget || isOpen) toggle();
  return el("div", {}, row, inside);
}

function makeLeaf(i) {
  const microbatch = tensors.microbatch[i] < 0 ? "" : ` · microbatch ${tensors.microbatch[i]}`;
  const symbol = SYMBOLS[word("verdict", i)];
  return el("button", { class: "row leaf", type: "button", onclick: () => showCard(i) },
    el("span", { class: "arrow" }), makeMark(stateOf(i), symbol), el("span", { class: "label" }, kindOf(i)),
    el("span", { class: "words" }, `step ${tensors.step[i]}${microbatch}`), makeMeter(ratioOf(i)));
}

// Error divided by tolerance: the bar is half full at 1, and full at 100.
function makeMeter(ratio) {
  const part = Number.isNaN(ratio) || ratio <= 0 ? 0 : Math.min(Math.max((Math.log10(ratio) + 2) / 4, 0.02), 1);
  return el("span", { class: "meter" },
    el("span", { class: "track" }, el("span", { class: ratio > 1 ? "wrong" : "pass", style: `--part: ${part}` })),
    el("span", { class: "ratio" }, Number.isNaN(ratio) ? "–" : `× ${format(ratio)}`));
}
