"""Training: the loop, its optimisers, many processes, and what it shows."""

from vssm.training.loop import train as train
