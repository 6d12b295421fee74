"""Where a check works: other engines than the threads of one process, with the same verdicts."""
