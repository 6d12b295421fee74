"""This folder judges traces offline: what rounding explains, what it does not, and why."""
