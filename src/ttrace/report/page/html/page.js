// Everything below the first screen, once the browser has shown that.

const PARTS = [makePlots, makeTree, makeMaps, makeFindings, makeConflicts, makeScales, makeCoverage, makePower, makeList, makeNotes, makeRun];
requestAnimationFrame(() => setTimeout(() => {
  const main = document.getElementById("main");
  for (const make of PARTS) main.append(...[make()].filter(Boolean));
  document.body.dataset.ready = "";
}));
