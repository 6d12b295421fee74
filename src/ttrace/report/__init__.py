"""This folder shows findings: to people in a terminal, to programs as JSON."""
