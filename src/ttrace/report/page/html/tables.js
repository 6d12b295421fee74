// Findings, replicas, scales, coverage, power and the run itself.

function makeFindings() {
  const rest = page.findings.slice(1);
  if (!rest.length) return null;
  const cards = rest.map(({ what, rest: words, facts }) =>
    el("details", {}, el("summary", {}, mark("wrong"), " ", el("code", {}, what), ` ${words}`), factList(facts)));
  return section("Further findings", "", cards);
}

function makeConflicts() {
  if (!page.conflicts.length) return null;
  const rows = page.conflicts.map(({ axis, count, worst, first }) => [axis, count, worst === null ? null : brief(worst), link(first)]);
  const { of, looked_at } = page.conflicts[0];
  const few = looked_at < of ? ` The axes are those of the first ${looked_at}.` : "";
  const lead = `${plural(of, "tensor")} of which replicas that must agree do not.${few}`;
  return section("Replicas that differ, by axis", lead, table(["axis", "tensors", "worst", "first"], rows));
}

function makeScales() {
  const groups = new Map();
  for (let i = 0; i < tensors.count; i++) {
    if (!isWrong(i) || !isFactor(i)) continue;
    const factor = Number((1 + tensors.scale[i]).toPrecision(3));
    if (!groups.has(factor)) groups.set(factor, []);
    groups.get(factor).push(i);
  }
  const rows = [...groups].sort((a, b) => b[1].length - a[1].length).slice(0, 12)
    .map(([factor, found]) => [`${factor} ×`, found.length, link(idOf(found[0]), found[0])]);
  if (!rows.length) return null;
  return section("Scale factors", "Wrong tensors that are the reference times one number, and little else.", table(["factor", "tensors", "first"], rows));
}

// Whether little is left of the error but what the scale explains: the rest is orthogonal to the reference.
function isFactor(i) {
  const [error, scale] = [tensors.error[i], tensors.scale[i]];
  const rest = Math.sqrt(Math.max(error ** 2 - scale ** 2, 0));
  return Number.isFinite(error) && rest < 0.03 * Math.abs(scale);
}

function makeCoverage() {
  const { kinds, verdicts, reasons, layouts } = page.coverage;
  const used = verdicts.map((_, k) => k).filter((k) => kinds.some((row) => row[k + 1]));
  const heads = ["kind", ...used.map((k) => `${SYMBOLS[verdicts[k]]} ${verdicts[k]}`)];
  const rows = kinds.map((row) => [row[0], ...used.map((k) => row[k + 1])]);
  const said = layouts.map(([who, count]) => `${count.toLocaleString("en")} ${who === "nobody" ? "by nobody" : who}`).join(", ");
  const why = reasons.map(({ reason, count, first, spoils }) =>
    [el("span", {}, mark("open", spoils ? "?" : "·"), ` ${reason}`), count, link(first)]);
  return section("Coverage", `What was compared, and what was not. Layouts: ${said}.`,
    table(heads, rows), why.length ? table(["not judged because", "tensors", "first"], why) : null);
}

function makePower() {
  const { kinds, blind, num_blind } = page.power;
  const rows = kinds.map(([kind, count, middle, worst]) => [kind, count, middle === null ? null : brief(middle), worst === null ? null : brief(worst)]);
  const names = blind.map(([name, why]) => [name, why]);
  return section("Power",
    "The smallest relative error that this run would have shown, by its tolerances. `ttrace selftest` tries it with known faults.",
    table(["kind", "tensors", "half of them", "all of them"], rows),
    num_blind ? el("details", {}, el("summary", {}, mark("open"), ` no power over ${plural(num_blind, "parameter")}`), table(["parameter", "why"], names)) : null);
}

function makeNotes() {
  const problems = page.problems.map((text) => el("li", {}, mark("open"), ` ${text}`));
  const notes = page.notes.map((text) => el("li", {}, text));
  if (!problems.length && !notes.length) return null;
  return section("Problems and notes", "", el("ul", { class: "plain" }, problems, notes));
}

function makeRun() {
  const { commands, seconds, versions } = page.run;
  const longest = Math.max(...seconds.map(([, value]) => value), 0);
  const times = seconds.map(([name, value]) => [name, `${value.toFixed(1)}\u00a0s`,
    el("span", { class: "time", style: `--part: ${value / longest}` })]);
  const both = versions.map(([name, ours, theirs]) => [name, ours, ours === theirs ? "" : theirs]);
  return section("The run", "",
    Object.entries(commands).map(([role, text]) => el("div", { class: "next" }, el("span", {}, role), command(text))),
    times.length ? table(["stage", "took", ""], times) : null,
    both.length ? table(["package", "version", "candidate, if another"], both) : null);
}

function link(id, i) {
  return el("button", { class: "link", type: "button", onclick: () => showCard(i ?? indexOf(id)) }, id);
}

function indexOf(id) {
  for (let i = 0; i < tensors.count; i++) if (idOf(i) === id) return i;
  return 0;
}
