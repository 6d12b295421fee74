"""The engine of a check that is not in the judge: a torchrun job, with the same verdicts as threads."""
