"""This module has the words of docs/evaluation.md; zoo/evaluation.py fills in what was measured."""

TEXT = """# Evaluation

Written by `python -m zoo evaluate`, which runs everything below; [the zoo](howto/zoo.md) says what an entry is, and how
to add one. Measured on {machine}.
Seconds are those of candidate and judgement, with the reference and its twins where no earlier entry had the same;
starting processes is left out, as entries share them.

| | measured | bar |
|---|---|---|
{summary}
## The paper's bugs

Those that are still in a released package which runs here are there twice: in that package, and in plain PyTorch.

| | bug | entry | tier | detected | module | cause | seconds | flagged |
|--:|---|---|---|---|---|---|--:|--:|
{paper}
## All entries

What was said is the first finding and its cause. *Clean* is the side that does not have the bug.

| entry | tier | detected | module | cause | seconds | flagged | clean | package | what was said |
|---|---|---|---|---|--:|--:|---|---|---|
{entries}
- Not detected: {missed}.
- Put elsewhere: {elsewhere}.
- Cause not named, or another: {other_cause}.

## False alarms

{controls} clean controls with {tensors} tensors: {precisions}. Every layout on several
draws of all values, with and without recomputation; float8, emulated; and look-alikes of bugs: other orders of
summation, buckets, kernels, wrappers and optimizers, reduction in more precision, dropout, gradients of nothing.

**{accused} were accused**, and {accused_sides} of the {sides} clean sides of bugs.

## Fixed tolerances on the same traces

The rules of others on the traces of all bugs, clean sides and controls above. They get what TTrace has put together, as
`zoo/fixed.py` says, and accuse a run if one tensor breaks them.

| tolerance | clean runs accused, of {runs} | bugs missed, of {bugs} | of the paper's {paper_bugs} |
|---|--:|--:|--:|
{fixed}
## Cost, beside waiting for the loss curve

The paper's bug 1 in the small transformer, on text that can be learned (`zoo/naive.py`), until the smoothed loss curves
of both sides differ by {parted}; seconds with starting all processes. The paper's model took more than 4000 steps and
6:40 hours against 54 s. A model as small as this one learns, and parts, within seconds, most of which start processes;
what counts is the number of steps.

| | steps of each side | seconds | what is known then |
|---|--:|--:|---|
| loss curves | {steps} | {naive_seconds} | that something is wrong |
| `ttrace run` | 1, and that of three twins | {ttrace_seconds} | {said} |

## Tolerance against depth, faults beside rounding

`python -m bench calibration --all` draws these; [where tolerances come from](explanation/tolerance.md) has the numbers.

![Estimated error against depth](explanation/figures/depth.svg)

![A fault's error, and the estimated and observed error of rounding, by layer](explanation/figures/faults.svg)

## What the zoo cannot show

Everything here ran on CPU with gloo. What that leaves out:

- **TransformerEngine's kernels and real FP8.** The paper's bugs 7, 8, 11, 12, 13 and 14 are of it. Here they are the
  same mistake in plain PyTorch (T3), with float8 emulated: what TTrace sees is the same, what the kernels do is not.
- **NCCL.** Messages that arrive in another order, groups that hang, sums made in the network: gloo has none of it.
- **Races.** Overlapped communication runs, but a buffer that is read too early is a matter of luck, and recording waits
  for each tensor. Such bugs are here as what they leave behind: a stale or an overwritten buffer.
- **Size.** Models have two to five layers and a few thousand parameters, on two or four ranks. Bugs that need more are
  not here; that tolerances hold up to 128 layers is [measured elsewhere](explanation/tolerance.md).
- **What is alike on both sides**, and the rest of [what TTrace cannot see](explanation/what-it-cannot-see.md).
"""
