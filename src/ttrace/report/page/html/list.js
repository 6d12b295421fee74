// The list of all tensors, of which only the rows in sight exist, and the card of one tensor.

const ROW = 30;
const wanted = { text: "", verdict: "", worstFirst: page.head.exit === 1 };
let refresh = () => {};

function makeList() {
  const search = el("input", { type: "search", placeholder: "part of an id", "aria-label": "part of an id", oninput: () => {
    wanted.text = search.value;
    refresh();
  } });
  const verdict = el("select", { "aria-label": "verdict", onchange: () => {
    wanted.verdict = verdict.value;
    refresh();
  } }, el("option", { value: "" }, "every verdict"), tensors.verdict.words.map((each) => el("option", { value: each }, `${SYMBOLS[each]} ${each}`)));
  const worst = el("input", { type: "checkbox", checked: wanted.worstFirst, onchange: () => {
    wanted.worstFirst = worst.checked;
    refresh();
  } });
  const count = el("span", { class: "total" }), inner = el("div", { class: "inner" });
  const heads = el("div", { class: "heads" }, el("span", { class: "label" }, "step / microbatch / module / kind"), el("span", {}, RATIO));
  const view = el("div", { class: "list", tabindex: "0", "aria-label": "all tensors" }, heads, inner);
  let rows = [];
  const render = () => renderRows(view, inner, rows);
  view.addEventListener("scroll", () => requestAnimationFrame(render), { passive: true });
  refresh = () => {
    verdict.value = wanted.verdict;
    rows = chooseRows();
    count.textContent = plural(rows.length, "tensor");
    inner.style.height = `${rows.length * ROW}px`;
    view.scrollTop = 0;
    render();
  };
  makeLazily(view, () => refresh());
  return el("section", { id: "all" }, el("h2", {}, "All tensors"),
    el("div", { class: "bar" }, search, verdict, el("label", {}, worst, "worst first"), count), view);
}

function chooseRows() {
  const verdict = tensors.verdict.words.indexOf(wanted.verdict), text = wanted.text.trim().toLowerCase();
  let rows = [];
  for (let i = 0; i < tensors.count; i++) {
    if ((verdict < 0 || tensors.verdict.at[i] === verdict) && (!text || idOf(i).toLowerCase().includes(text))) rows.push(i);
  }
  const key = (i) => (Number.isNaN(ratioOf(i)) ? -1 : ratioOf(i));
  if (wanted.worstFirst) {
    const keys = new Map(rows.map((i) => [i, key(i)]));
    rows.sort((a, b) => keys.get(b) - keys.get(a) || a - b);
  }
  return rows;
}

function renderRows(view, inner, rows) {
  const from = Math.max(Math.floor(view.scrollTop / ROW) - 5, 0);
  const to = Math.min(from + Math.ceil(view.clientHeight / ROW) + 10, rows.length);
  inner.replaceChildren(...rows.slice(from, to).map((i, k) => {
    return el("button", { class: "row", type: "button", style: `top: ${(from + k) * ROW}px`, onclick: () => showCard(i) },
      makeMark(stateOf(i), SYMBOLS[word("verdict", i)]), el("span", { class: "label" }, idOf(i)), makeMeter(ratioOf(i)));
  }));
}

document.addEventListener("only", ({ detail }) => {
  wanted.verdict = detail;
  refresh();
  document.getElementById("all").scrollIntoView({ block: "start" });
});

function showCard(i) {
  const card = document.getElementById("card");
  const layout = word("layout", i) ? `"${word("layout", i)}", ` : "";
  const facts = [
    ["verdict", `${SYMBOLS[word("verdict", i)]} ${word("verdict", i)}`],
    ["why", word("reason", i)],
    ["error", `${format(tensors.error[i])} = ${inEpsilon(tensors.error[i])}, ${format(ratioOf(i))} × the tolerance`],
    ["tolerance", `${format(tensors.tolerance[i])} (twins ${format(tensors.twins[i])})`],
    ["replicas", tensors.replicas[i] > 0 ? `differ by ${format(tensors.replicas[i])}` : ""],
    ["scale", Number.isNaN(tensors.scale[i]) ? "" : `1 ${tensors.scale[i] < 0 ? "−" : "+"} ${format(Math.abs(tensors.scale[i]))}`],
    ["layout", word("by", i) ? layout + word("by", i) : ""],
  ].filter(([, text]) => text && !text.startsWith("– "));
  card.replaceChildren(
    el("button", { class: "close", type: "button", "aria-label": "close", onclick: () => (card.hidden = true) }, "×"),
    el("code", { class: "site" }, idOf(i)),
    makeFacts(facts),
    makeCommand(`ttrace diff ${quote(page.title)} ${quote(idOf(i))}`),
  );
  card.hidden = false;
}

const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`);
