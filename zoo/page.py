"""Template of docs/evaluation.md; zoo/evaluation.py fills in the measurements."""

TEXT = """# Evaluation

`python -m zoo evaluate` runs everything below and writes this page; [the zoo](howto/zoo.md) says what an entry is,
and how to add one. Measured on {machine}. Seconds are the time of the candidate and its check, and of the reference
and its twins where no earlier entry had the same ones. The start of processes is not included, because entries share
them.

| | measured | bar |
|---|---|---|
{summary}
## The paper's bugs

A bug that is still in a released package that runs here has two rows: in that package, and in plain PyTorch.

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

{controls} clean controls with {tensors} tensors: {precisions}. Every layout with several
random draws of all values, with and without recomputation; float8, emulated; and look-alikes of bugs: other orders of
summation, buckets, kernels, wrappers and optimizers, reduction in higher precision, dropout, gradients that are zero.

**{accused} were accused**, and {accused_sides} of the {sides} clean sides of bugs.

## Fixed tolerances on the same traces

The tolerances of other tools, on the traces of all bugs, clean sides and controls above. They get the logical tensors
that TTrace assembled (`zoo/fixed.py`), and accuse a run if one tensor exceeds them.

| tolerance | clean runs accused, of {runs} | bugs missed, of {bugs} | of the paper's {paper_bugs} |
|---|--:|--:|--:|
{fixed}
## Cost, compared with waiting for the loss curve

The paper's bug 1 in the small transformer, trained on text that can be learned (`zoo/naive.py`), until the smoothed
loss curves of both sides differ by {parted}. The seconds include the start of all processes. The paper's model took
more than 4000 steps and 6:40 hours, compared with 54 s. A model as small as this one learns, and its curves separate,
within seconds, most of which are the start of processes. The number of steps is what matters.

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

Everything here ran on CPU with gloo. This leaves out:

- **TransformerEngine's kernels and real FP8.** The paper's bugs 7, 8, 11, 12, 13 and 14 are in it. Here the
  same mistake is in plain PyTorch (T3), with float8 emulated: TTrace sees the same, but the kernels are different.
- **NCCL.** Messages that arrive in another order, groups that hang, sums computed in the network: gloo has none.
- **Races.** Overlapped communication runs, but whether a buffer is read too early depends on timing, and recording
  waits for each tensor. Such bugs are represented by their result: a stale or an overwritten buffer.
- **Size.** Models have two to five layers and a few thousand parameters, on two or four ranks. Bugs that need more are
  not included. [Another page](explanation/tolerance.md) measures tolerances up to 128 layers, and
  [real widths](reference/wide.md) repeats controls and bugs at the widths of models that people train.
- **Bugs that both sides share**, and everything else that [TTrace cannot see](explanation/what-it-cannot-see.md).
"""
