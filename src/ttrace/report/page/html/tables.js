// Findings, replicas, scales, collectives, coverage, power and the run itself.

function makeFindings() {
  const rest = page.findings.slice(1);
  if (!rest.length) return null;
  const cards = rest.map(({ what, rest: words, facts }) =>
    el("details", {}, el("summary", {}, makeMark("wrong"), " ", el("code", {}, what), ` ${words}`), makeFacts(facts)));
  return makeSection("Further findings", "", cards);
}

function makeConflicts() {
  if (!page.conflicts.length) return null;
  const rows = page.conflicts.map(({ axis, count, worst, first }) => [axis, count, worst === null ? null : format(worst), makeLink(first)]);
  const { of, looked_at } = page.conflicts[0];
  const few = looked_at < of ? ` The table counts the first ${looked_at} of them.` : "";
  const lead = `Replicas of ${plural(of, "tensor")} must agree, but differ.${few}`;
  return makeSection("Replicas that differ, by axis", lead, makeTable(["axis", "tensors", "worst", "first"], rows));
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
    .map(([factor, rows]) => [`${factor} ×`, rows.length, makeLink(idOf(rows[0]), rows[0])]);
  if (!rows.length) return null;
  return makeSection("Scale factors", "Wrong tensors that equal the reference times one number, with little other error.", makeTable(["factor", "tensors", "first"], rows));
}

// Whether the scale explains nearly all of the error: the rest of it is orthogonal to the reference.
function isFactor(i) {
  const [error, scale] = [tensors.error[i], tensors.scale[i]];
  const rest = Math.sqrt(Math.max(error ** 2 - scale ** 2, 0));
  return Number.isFinite(error) && rest < 0.03 * Math.abs(scale);
}

function makeCollectives() {
  const { columns, rows, count } = page.collectives;
  if (!rows.length) return null;
  const few = rows.length < count ? ` The table has the first ${rows.length} of ${count} rows.` : "";
  const lead = `What a rank issued in the traced steps, in which module, over which mesh axes, and from which line.${few}`;
  return makeSection("Collectives", lead,
    el("details", { open: rows.length <= 12 || null }, el("summary", {}, plural(count, "row")), makeTable(columns, rows)));
}

const LAYOUT_SOURCES = { stated: "stated", inferred: "inferred from shapes", nobody: "not stated" };

function makeCoverage() {
  const { kinds, verdicts, reasons, layouts } = page.coverage;
  const used = verdicts.map((_, k) => k).filter((k) => kinds.some((row) => row[k + 1]));
  const heads = ["kind", ...used.map((k) => `${SYMBOLS[verdicts[k]]} ${verdicts[k]}`)];
  const rows = kinds.map((row) => [row[0], ...used.map((k) => row[k + 1])]);
  const sources = layouts.map(([source, count]) => `${count.toLocaleString("en")} ${LAYOUT_SOURCES[source]}`).join(", ");
  const why = reasons.map(({ reason, count, first, spoils }) =>
    [el("span", {}, makeMark("open", spoils ? "?" : "·"), " ", prose(reason)), count, makeLink(first)]);
  return makeSection("Coverage", `What was compared, and what was not. Layouts: ${sources}.`,
    makeTable(heads, rows), why.length ? makeTable(["not judged because", "tensors", "first"], why) : null);
}

function makePower() {
  const { kinds, blind, num_blind } = page.power;
  const number = (value) => (value === null ? null : format(value));
  const rows = kinds.map(([kind, count, median, worst]) => [kind, count, number(median), number(worst)]);
  const names = blind.map(([name, why]) => [name, el("span", {}, prose(why))]);
  return makeSection("What this run could have found",
    "The smallest relative error that this run would have reported, according to its tolerances: for the median tensor of " +
      "each kind, and for the worst. `ttrace selftest` tests this with known faults.",
    makeTable(["kind", "tensors", "median", "worst"], rows),
    num_blind ? el("details", {}, el("summary", {}, makeMark("open"), ` a bug may pass in ${plural(num_blind, "parameter")}`), makeTable(["parameter", "why"], names)) : null);
}

function makeNotes() {
  const problems = page.problems.map((text) => el("li", {}, makeMark("open"), " ", prose(text)));
  const notes = page.notes.map((text) => el("li", {}, prose(text)));
  if (!problems.length && !notes.length) return null;
  return makeSection("Problems and notes", "", el("ul", { class: "plain" }, problems, notes));
}

function makeRun() {
  const { sides, seconds, versions } = page.run;
  const longest = Math.max(...seconds.map(([, value]) => value), 0);
  const times = seconds.map(([name, value]) => [name, `${value.toFixed(1)}\u00a0s`,
    el("span", { class: "time", style: `--part: ${value / longest}` })]);
  const same = () => el("span", { class: "total" }, "the same");
  const compared = ([name, ours, theirs]) => [name, ours || "–", ours === theirs ? same() : theirs || "–"];
  const [reference, candidate] = sides;
  const rows = [["traced", reference.date, candidate.date], ["git commit", reference.commit, candidate.commit], ...versions]
    .filter(([, ours, theirs]) => ours || theirs).map(compared);
  return makeSection("The run", "",
    sides.filter((side) => side.command).map((side) => el("div", { class: "next" }, el("span", {}, side.role), makeCommand(side.command))),
    rows.length ? makeTable(["", "reference", "candidate"], rows) : null,
    times.length ? makeTable(["stage", "took", ""], times) : null);
}

function makeLink(id, i) {
  return el("button", { class: "link", type: "button", onclick: () => showCard(i ?? indexOf(id)) }, id);
}

function indexOf(id) {
  for (let i = 0; i < tensors.count; i++) if (idOf(i) === id) return i;
  return 0;
}
