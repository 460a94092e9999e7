"""The engine: what makes repeated calls fast. CUDA graphs, and when they have to be recorded anew."""
