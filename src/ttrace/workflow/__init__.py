"""The workflow: run reference, twins and candidate, judge them, and follow up findings."""
