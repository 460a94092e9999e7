"""A run on disk: its folder, checkpoints and weights, shipped models, the hub, and result files."""
