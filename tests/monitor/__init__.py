"""Tests of the monitor of long runs."""
