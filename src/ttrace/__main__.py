"""`python -m ttrace`, the same as `ttrace`."""

from ttrace.cli import main

main()
