"""What was measured of frameworks: kept as JSON, and written as a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from zoo.frameworks.outcomes import Outcome
from zoo.frameworks.rows import ROWS, Row
from zoo.harness.torches.environment import ROOT

MEASURED = ROOT / "docs" / "measured" / "frameworks.json"
PAGE = ROOT / "docs" / "reference" / "frameworks.md"


@dataclass
class Measured:
    """The outcome of each row that was measured."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Measured:
        kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
        return cls({outcome["row"]: Outcome(**outcome) for outcome in kept})

    def write(self) -> None:
        """Write the file and the page, in the order of the rows in the code."""
        self.outcomes = {row.name: self.outcomes[row.name] for row in ROWS if row.name in self.outcomes}
        kept = [asdict(outcome) for outcome in self.outcomes.values()]
        MEASURED.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(self.format_page())

    def format_page(self) -> str:
        rows = [row for row in ROWS if row.name in self.outcomes]
        return _TEXT.format(
            rows="\n".join(_format_row(row, self.outcomes[row.name]) for row in rows),
            num_clean=sum(outcome.is_clean for outcome in self.outcomes.values()),
            num_rows=len(self.outcomes),
            num_found=sum(outcome.num_found for outcome in self.outcomes.values()),
            num_bugs=sum(len(outcome.bugs) for outcome in self.outcomes.values()),
        )


def _format_row(row: Row, outcome: Outcome) -> str:
    passes = f"{outcome.num_tensors} tensors" if outcome.is_clean else f"**no, exit {outcome.exit}**"
    bugs = ", ".join(_format_bug(bug, outcome) for bug in outcome.bugs)
    added = str(outcome.num_added_lines)
    cells = (row.framework, outcome.version, row.layout, f"`{row.script}`", passes, added, bugs)
    return f"| {' | '.join(cells)} | {outcome.seconds:.0f} |"


def _format_bug(bug: str, outcome: Outcome) -> str:
    return f"{bug} (`{outcome.places[bug]}`)" if bug in outcome.places else f"**{bug}: exit {outcome.bugs[bug]}**"


_TEXT = """# Frameworks

TTrace checks unchanged scripts of these frameworks, because it finds the training step automatically. `python -m zoo
frameworks` runs every row below and writes this page. The reference is the same script in one process. The candidate
runs on two ranks, on CPU with gloo. The scripts are in `zoo/frameworks/scripts`.

- *unchanged script passes*: `ttrace run` exits with 0, and this number of tensors agrees with the reference within
  rounding error.
- *lines added*: the number of lines of the script that mention TTrace.
- *planted bugs found*: each bug was planted in the candidate (`--bug`), and `ttrace run` exits with 1. The first wrong
  tensor is in brackets.
- *seconds*: the time of `ttrace run` on the unchanged script, with one twin. Most of it is spent on imports.

| framework | version | layout | script | unchanged script passes | lines added | planted bugs found | seconds |
|---|---|---|---|---|--:|---|--:|
{rows}

{num_clean} of {num_rows} unchanged scripts pass, and {num_found} of {num_bugs} planted bugs are found.
Unexpected results are bold.

What the bugs are:

- `items`: the loss ignores `num_items_in_batch`. It is a mean of means over sentences with different numbers of labels.
- `loss`: the loss is multiplied or divided by the number of ranks, or by 2 on one rank.
- `accumulation`: the loss is divided twice by the number of microbatches.
- `sync`: gradients are not reduced (`no_backward_sync` in the last microbatch).
- `unprepared`: the model is not wrapped in DDP, so every worker trains its own model.
- `eps`: a norm has a different eps on one rank.
- `scaling`: LoRA's alpha differs on one rank.

How to run each: [Trainer, TRL and PEFT](../howto/trainer.md), [Accelerate](../howto/accelerate.md),
[DeepSpeed](../howto/deepspeed.md), [Lightning](../howto/lightning.md), [Ray Train](../howto/ray.md),
[torchtitan](../howto/torchtitan.md).
"""
