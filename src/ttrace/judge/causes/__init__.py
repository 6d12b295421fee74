"""Causes of a wrong tensor: the detectors, in the order in which they are asked.

The first detector that finds a cause decides, so the most specific ones come first. A detector is a function with the
decorator `cause` (evidence.py); `find_cause` (search.py) asks them one by one. docs/develop/cause.md adds one.
"""

from ttrace.judge.causes import formulas, neighbours, numbers, operands, optimizer, order, reductions, rows
from ttrace.judge.causes.evidence import Detector

DETECTORS: tuple[Detector, ...] = (
    # Values that follow no pattern, and records that name the cause by themselves.
    numbers.find_not_finite,
    numbers.find_padded_vocabulary,
    optimizer.find_not_loaded,
    optimizer.find_not_updated,
    optimizer.find_other_settings,
    optimizer.find_updated_twice,
    numbers.find_zeros,
    numbers.find_offset,
    numbers.find_count,
    # Replicas that differ, by what they add up to: an exact sum is more specific than an average or another group.
    reductions.find_missing_all_reduce,
    reductions.find_missing_average,
    reductions.find_wrong_group,
    reductions.find_missing_all_reduce_before_bias,
    # Clipping: the first needs a gradient norm that is right, the last takes what the others leave.
    reductions.find_clip_factor,
    optimizer.find_clipping_on_one_side,
    reductions.find_gradient_norm,
    # The whole tensor: a known other one, or a multiple of the reference.
    formulas.find_own_statistics,
    neighbours.find_partial_sum,
    reductions.find_double_reduction,
    reductions.find_constant_factor,
    neighbours.find_others_values,
    # The right values in the wrong place, and what was added to them.
    order.find_moved_values,
    order.find_transposed_values,
    rows.find_bias,
    formulas.find_attention_scores,
    formulas.find_miscounted_part,
    # Some rows only, and what a tensor was computed from.
    rows.find_wrong_rows,
    rows.find_uneven_weights,
    operands.find_wrong_lookup,
    operands.find_stale_input,
    operands.find_miscounted_microbatches,
    operands.find_backward_left_out,
    # What only loosely describes the error.
    optimizer.find_other_step_count,
    numbers.find_weaker_dtype,
    formulas.find_function,
    reductions.find_wrong_ranks,
    formulas.find_row_factors,
    optimizer.find_tied_copies,
    reductions.find_differing_replicas,
    neighbours.find_misdirected_message,
)
"""Every detector; a function that is missing here is never asked."""
