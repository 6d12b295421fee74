"""Reports of findings: for people in a terminal and as a page, for programs as JSON."""
