"""Commands that look at what a run recorded and found."""
