"""The limits of a server."""

from dataclasses import dataclass

from vssm.checks import check_number


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds every limit of a server.

    Example:
        >>> Settings(max_queue=8).max_queue
        8
        >>> Settings(max_num=0)
        Traceback (most recent call last):
        ValueError: max_num is 0; it must be a number > 0
    """

    max_num: int = 256
    """Maximum number of sequences in one request."""
    max_length: int = 4096
    """Maximum number of new steps in one request, and of steps in a prompt."""
    max_cells: int = 65_536
    """Maximum of sequences times steps in one request, including the prompt."""
    max_body: int = 8 * 2**20
    """Maximum number of bytes in one request."""
    max_queue: int = 128
    """Maximum number of requests in progress; beyond it the answer is 429."""
    max_connections: int = 256
    """Maximum number of connections, each with a body of at most `max_body`; beyond it the answer
    is 503."""
    max_rows: int = 64
    """Maximum number of sequences, from several requests, that are computed together; 1 for no
    batching."""
    threads: int | None = None
    """Threads that compute; by default `vssm serve` takes one fewer than there are cores."""
    timeout: float = 60.0
    """Seconds that a request may take after its body has arrived; a request that has not begun
    after half of them is answered with 429."""
    body_timeout: float = 10.0
    """Seconds that a client may take to send the body of its request."""
    resume_seconds: float = 600.0
    """How long a state can be resumed."""
    resume_count: int = 1024
    """Maximum number of states in the server; the least recently used is dropped first."""
    resume_mib: int = 256
    """Maximum size of all states in the server, in MiB."""
    hosts: tuple[str, ...] = ()
    """Names that the server answers to in the Host header; empty for all."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                check_number(name, value, 0, above=True)
