"""`python -m vssm` is the command line; `torchrun ... -m vssm train ...` starts it on many GPUs."""

import os
import signal

_SPINS = "3000"  # iterations before a waiting thread sleeps; the default is 300,000


def main() -> None:
    """Runs the command line. Both set-up steps must come before PyTorch is imported."""
    _let_threads_sleep()
    ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if not ignored:
        signal.signal(signal.SIGINT, _stop)
    from vssm.cli import main as run

    if not ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _let_threads_sleep() -> None:
    """Lets OpenMP threads sleep soon while they wait for each other.

    GNU OpenMP, which PyTorch uses on Linux, spins for milliseconds. On a busy machine the spinning
    threads take the processor from the thread that they wait for: with one of two cores busy, a
    training step took ten times as long. Settings of the user take precedence.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def _stop(*_: object) -> None:
    """Ends the process with one line: an exception could be swallowed by a module that is being
    imported."""
    os.write(2, b"vssm: stopped by the user\n")
    os._exit(130)


if __name__ == "__main__":
    main()
