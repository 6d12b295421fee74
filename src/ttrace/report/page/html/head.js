// The first screen: the verdict, the first wrong tensor, its cause, the next command.

const VERDICTS = ["agrees", "wrong", "not judged"];
const EXIT_STATES = ["pass", "wrong", "open"];
const FIRST_FACTS = 12;

function makeHead(head) {
  const { exit, symbol, what, rest, mesh, ranks } = page.head;
  const state = EXIT_STATES[exit];
  document.title = `${symbol} ${what || rest} · ${page.title}`;
  const [first] = page.findings;
  const cause = first && first.facts.find(([label]) => label === "cause");
  const around = [page.title, ranks && plural(ranks, "rank"), mesh, page.precision.name, page.run.date, describeCommits()];
  appendTo(head, [
    el("p", { class: "where" }, el("b", {}, "TTrace"), ` ${around.filter(Boolean).join(" · ")}`),
    el("h1", {}, el("span", { class: `verdict ${state}` }, `${symbol} ${VERDICTS[exit]}`),
      what ? el("span", { class: "site" }, what) : null, el("span", { class: what ? "rest" : "rest alone" }, rest)),
    cause ? el("p", { class: "cause" }, prose(cause[1])) : null,
    exit === 1 ? null : makeProblems(),
    page.reach.length ? makeFacts(page.reach) : null,
    el("div", { class: "next" }, el("span", {}, "next"), makeCommand(page.next)),
    makeChips(),
    first ? makeFacts(first.facts.filter((fact) => fact !== cause).slice(0, FIRST_FACTS)) : null,
  ]);
}

// The commits that were traced: one if both sides ran the same.
function describeCommits() {
  const known = page.run.sides.filter((side) => side.commit);
  const distinct = [...new Set(known.map((side) => side.commit))];
  if (distinct.length < 2) return distinct.length ? `commit ${distinct[0]}` : "";
  return known.map((side) => `${side.role} at commit ${side.commit}`).join(", ");
}

function makeProblems() {
  const items = page.problems.slice(0, 3).map((text) => el("li", {}, makeMark("open"), " ", prose(text)));
  const reasons = page.coverage.reasons.filter((row) => row.spoils).slice(0, 3 - items.length);
  items.push(...reasons.map((row) => el("li", {}, makeMark("open"), ` ${plural(row.count, "tensor")}: `, prose(row.reason))));
  return items.length ? el("ul", { class: "plain" }, items) : null;
}

function makeFacts(facts) {
  return el("dl", { class: "facts" }, facts.map(([label, text]) => [el("dt", {}, label), el("dd", {}, prose(text))]));
}

function makeChips() {
  const counts = Object.entries(page.counts).filter(([, count]) => count);
  const chip = ([verdict, count]) => {
    const state = verdict === "PASS" ? "pass" : verdict === "FAIL" || verdict === "CONFLICT" ? "wrong" : "open";
    const label = ` ${count.toLocaleString("en")} ${verdict}`;
    return el("button", { class: "chip", type: "button", onclick: () => document.dispatchEvent(new CustomEvent("only", { detail: verdict })) },
      makeMark(state, SYMBOLS[verdict]), label);
  };
  const total = el("span", { class: "total" }, plural(page.count, "tensor"));
  return el("div", { class: "chips" }, total, counts.map(chip));
}

makeHead(document.getElementById("head"));
