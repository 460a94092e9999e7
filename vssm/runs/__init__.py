"""A run on disk: its folder, checkpoints, weights of shipped models and of the hub, and result files."""
