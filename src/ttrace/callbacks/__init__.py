"""Callbacks for frameworks that hide the training loop, for scripts that say themselves what is to be traced."""
