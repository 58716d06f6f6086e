"""Callbacks and loggers, one small thing a file."""
