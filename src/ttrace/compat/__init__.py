"""Private and version-dependent APIs of torch, which only this folder uses."""
