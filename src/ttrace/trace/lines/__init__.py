"""Lines of a trace: one record each."""
