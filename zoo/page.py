"""Template of docs/evaluation.md; zoo/evaluation.py fills in the measurements."""

TEXT = """# Evaluation

`python -m zoo evaluate` runs everything below and writes this page. [The zoo](howto/zoo.md) explains what an entry is,
and how to add one. Measured on {machine}. The seconds are the time of the candidate and its check, plus the time of the
reference and its twins unless an earlier entry used the same ones. They do not include the start of processes, because
entries share processes.

| | measured | bar |
|---|---|---|
{summary}
## The paper's bugs

If a released package that runs here still has the bug, it has two rows: one in that package, and one in plain PyTorch.

| | bug | entry | tier | detected | module | cause | seconds | flagged |
|--:|---|---|---|---|---|---|--:|--:|
{paper}
## All entries

The last column is the first finding and its cause. *Clean* is the side that does not have the bug.

| entry | tier | detected | module | cause | seconds | flagged | clean | package | first finding |
|---|---|---|---|---|--:|--:|---|---|---|
{entries}
- Not detected: {missed}.
- Located elsewhere: {elsewhere}.
- Cause not named, or a wrong one: {other_cause}.

## False alarms

There are {controls} clean controls with {tensors} tensors: {precisions}. They include every layout with several
random draws of all values, with and without recomputation, and emulated float8. They also include correct programs
that look like bugs: different orders of summation, buckets, kernels, wrappers and optimizers, reduction in higher
precision, dropout, and gradients that are zero.

**TTrace accused {accused} of them**, and {accused_sides} of the {sides} clean sides of bugs.

## Fixed tolerances on the same traces

This table applies the tolerances of other tools to the traces of all bugs, clean sides and controls above. They compare
the logical tensors that TTrace assembled (`zoo/fixed.py`), and accuse a run if one tensor exceeds the tolerance.

| tolerance | clean runs accused, of {runs} | bugs missed, of {bugs} | of the paper's {paper_bugs} |
|---|--:|--:|--:|
{fixed}
## Cost, compared with waiting for the loss curve

The small transformer with the paper's bug 1 is trained on text that can be learned (`zoo/naive.py`), until the smoothed
loss curves of both sides differ by {parted}. The seconds include the start of all processes. The paper's model needed
more than 4000 steps and 6:40 hours, compared with 54 s for a check. The curves of a model as small as this one separate
within seconds, most of which are the start of processes. Compare the numbers of steps.

| | steps of each side | seconds | result |
|---|--:|--:|---|
| loss curves | {steps} | {naive_seconds} | that something is wrong |
| `ttrace run` | 1, and that of three twins | {ttrace_seconds} | {said} |

## Tolerance and depth, bugs and rounding

`python -m bench calibration --all` draws these figures; [where tolerances come from](explanation/tolerance.md) has
the numbers.

![Estimated error against depth](explanation/figures/depth.svg)

![The error of a bug, and the estimated and observed error of rounding, by layer](explanation/figures/faults.svg)

## What the zoo cannot show

Everything here ran on CPU with gloo. It does not test:

- **TransformerEngine's kernels and real FP8.** The paper's bugs 7, 8, 11, 12, 13 and 14 are in TransformerEngine.
  Here the same mistakes are in plain PyTorch (T3), with emulated float8. TTrace sees the same tensors, but the kernels
  differ.
- **NCCL.** Gloo does not reorder messages, does not compute sums in the network, and its groups do not hang.
- **Races.** Overlapped communication runs, but whether a buffer is read too early depends on timing, and recording
  waits for each tensor. Such bugs are represented by their result: a stale or an overwritten buffer.
- **Size.** Models have two to five layers and a few thousand parameters, on two or four ranks. Bugs that need
  larger models are not included. [Another page](explanation/tolerance.md) measures tolerances up to 128 layers, and
  [real widths](reference/wide.md) repeats controls and bugs at the widths of models that people train.
- **Bugs that both sides share**, and everything else that [TTrace cannot see](explanation/what-it-cannot-see.md).
"""
