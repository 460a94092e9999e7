"""The scan of two interleaved streams, of which one looks a step ahead and changes nothing."""

from torch import Tensor

from vssm.ops.scan import choose_backend, kernels_of
from vssm.ops.scan.reference import selective_scan_reference


def scan_ahead(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    h0: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Returns y of a scan, with softplus, of which only the odd steps change the state.

    Steps are counted from 0. The even steps are a second stream, which looks one step ahead
    (`vssm.sampling.ahead`). There is no gradient.

    Example:
        >>> import torch
        >>> u, A, one = torch.ones(1, 3, 1), -torch.ones(1, 1), torch.ones(1)
        >>> even, odd, after = scan_ahead(u, u, A, u, u, one, u, one)[0, :, 0]
        >>> bool(even == odd), bool(after > odd)
        (True, True)
    """
    inputs = (u, dt, A, B, C, D, z, dt_bias, h0)
    backend = choose_backend(backend, u.device, u.dtype)
    if backend == "reference":
        return selective_scan_reference(*inputs, softplus=True, ahead=True)[0]
    if backend == "numba":
        inputs = tuple([None if t is None else t.float() for t in inputs])
    return kernels_of("scan", backend).scan_ahead(inputs)
