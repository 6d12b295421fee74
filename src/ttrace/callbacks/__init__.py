"""Callbacks for frameworks that contain the training loop, for scripts that choose themselves what is traced."""
