"""`ttrace.watch`: every few steps of a long run, compare what must be equal on several ranks, without a reference."""
