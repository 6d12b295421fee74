"""Findings: where a candidate starts to be wrong, and what keeps it from being judged."""
