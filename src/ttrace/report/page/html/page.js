// Everything below the first screen, made after the browser has shown that.

const IS_CLEAN = page.head.exit === 0;
const SECTIONS = [
  // A run that found nothing is worth what it could have found.
  IS_CLEAN ? makePower : null,
  makePlots, makeTree, makeMaps, makeFindings, makeConflicts, makeScales, makeCollectives, makeCoverage,
  IS_CLEAN ? null : makePower,
  makeList, makeNotes, makeRun,
].filter(Boolean);
requestAnimationFrame(() => setTimeout(() => {
  const main = document.getElementById("main");
  for (const make of SECTIONS) main.append(...[make()].filter(Boolean));
  document.body.dataset.ready = "";
}));
