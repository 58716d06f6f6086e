"""Run folders: what a run writes, and what is read back from it (evaluate, predict)."""
