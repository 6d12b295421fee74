"""This folder says what a logical tensor is called, and which part of it a rank holds: pure values."""
