"""Training: the loop, its optimisers, many processes, and what it shows."""

from vssm.training.loop import choose_device as choose_device
from vssm.training.loop import train as train
