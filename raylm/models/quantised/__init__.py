"""Quantised checkpoints. `read_config` reads what config.json says of them, without torch; `join` makes tensors of
their weights that are decoded while they are read."""
