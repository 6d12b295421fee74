"""Probes: what a session does with each tensor it sees, such as recording, perturbing or replacing it."""
