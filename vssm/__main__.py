"""`python -m vssm` is the command line; `torchrun ... -m vssm train ...` starts it on many GPUs."""

from vssm.cli import main

main()
