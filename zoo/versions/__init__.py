"""The versions of torch, Python and frameworks on which TTrace runs: `python -m zoo.versions` measures them."""
