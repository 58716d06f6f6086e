"""The hardware: what is there (probe) and what a run takes of it, with the reason (plan)."""
