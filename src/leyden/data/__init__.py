"""The data path: sample order, loaders, the base datamodule, tables and batch transforms.

Nothing here knows a domain, the engine or Hydra.
"""
