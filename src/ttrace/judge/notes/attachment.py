"""Notes on what automatic attachment found."""

from __future__ import annotations

from collections.abc import Iterator

from ttrace.trace.format import Attachment
from ttrace.trace.reader import Trace


def note_attachment(reference: Trace, candidate: Trace) -> Iterator[str]:
    """Say what TTrace attached to, on each side where the script did not do it."""
    sides = {"reference": reference.manifest.attachment, "candidate": candidate.manifest.attachment}
    found = {side: attachment for side, attachment in sides.items() if attachment is not None}
    for side, attachment in found.items():
        yield f"{side}: found {_describe(attachment)}"


def _describe(attachment: Attachment) -> str:
    number = attachment.num_microbatches
    microbatches = ", 1 microbatch a step on rank 0" if number == 1 else f", {number} microbatches a step on rank 0"
    return (
        f"model {attachment.model}, optimizer {', '.join(attachment.optimizers)}{microbatches if number else ''}; "
        f"data {'kept' if attachment.keeps_data else 'replaced'}: {attachment.data}"
    )
