"""Several processes for one run: they are started, watched, and ended together."""
