"""Training: the base task, optimisers, schedules and seeded randomness. Nothing here knows a domain."""
