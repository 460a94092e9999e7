"""The scan with the signature of mamba-ssm's `selective_scan_fn`, for code that was written for it.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t          y_t = C_t h_t + D u_t

Shapes: u, delta, z, y (B, D, L); A (D, N); D, delta_bias (D,); h (B, D, N); B and C one of

| shape        | meaning                                                              |
| ------------ | -------------------------------------------------------------------- |
| (B, N, L)    | one matrix a step, shared by all channels                            |
| (B, G, N, L) | one matrix a step for each of G groups of neighbouring channels      |
| (D, N)       | the same at all steps; then channels are scanned one after the other |
"""
# ruff: noqa: ANN001 (the types of all arguments are those of `selective_scan_fn`)

import torch
from torch import Tensor

from vssm.ops.scan import selective_scan


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the selective scan on tensors in the layout of mamba-ssm.

    Arguments:
        u: The input, (B, D, L).
        delta: The step sizes, (B, D, L), before bias and softplus.
        A: The continuous-time decay, (D, N), real and negative.
        B: The input matrix: (B, N, L), (B, G, N, L) or (D, N).
        C: The output matrix, in one of the shapes of B.
        D: The skip connection, (D,).
        z: The gate, (B, D, L): y is multiplied by silu(z).
        delta_bias: Added to delta, (D,).
        delta_softplus: Whether delta passes through softplus.
        return_last_state: Whether to return the state after the last step, too.
        initial_state: The state to start from, (B, D, N); zero if not given. mamba-ssm has no
            such argument.

    Returns:
        y (B, D, L) in the dtype of u, or y and the last state (B, D, N). Unlike in mamba-ssm,
        gradients flow from the last state, too.

    Example:
        >>> u, delta, A = torch.ones(1, 2, 3), torch.ones(1, 2, 3), -torch.ones(2, 1)
        >>> B, C = torch.ones(1, 1, 3), torch.ones(1, 1, 3)
        >>> selective_scan_fn(u, delta, A, B, C)[0, 0]
        tensor([1.0000, 1.3679, 1.5032])
    """
    _check_arguments(u, delta, A, B, C, D, z, delta_bias, initial_state)
    matrices = [_groups_of(matrix, u) for matrix in (B, C)]
    groups = max(map(len, matrices))

    def split(tensor: Tensor | None, dim: int = 0) -> list:
        return [None] * groups if tensor is None else list(tensor.chunk(groups, dim))

    Bs, Cs = ([matrix for matrix in own for _ in range(groups // len(own))] for own in matrices)
    us, deltas, zs = (split(None if tensor is None else tensor.mT, 2) for tensor in (u, delta, z))
    rest = split(D), zs, split(delta_bias), [delta_softplus] * groups, split(initial_state, 1)
    scans = zip(us, deltas, split(A), Bs, Cs, *rest, strict=True)
    ys, hs = zip(*(selective_scan(*arguments) for arguments in scans), strict=True)
    y, last = (ys[0], hs[0]) if groups == 1 else (torch.cat(ys, 2), torch.cat(hs, 1))
    return (y.mT, last) if return_last_state else y.mT


def _groups_of(matrix: Tensor, u: Tensor) -> list[Tensor]:
    """Returns B or C of each group, (B, L, N)."""
    if matrix.dim() == 2:
        matrix = matrix[None, ..., None].expand(len(u), -1, -1, u.shape[2])
    return [matrix.mT] if matrix.dim() == 3 else list(matrix.mT.unbind(1))


def _check_arguments(u, delta, A, B, C, D, z, delta_bias, initial_state) -> None:
    """Raises `ValueError` if shapes do not fit; `selective_scan` checks dtypes and devices."""
    for name, tensor in {"A": A, "B": B, "C": C}.items():
        if tensor.is_complex():
            raise ValueError(f"{name} is complex; the scan takes real A, B and C only")
    if u.dim() != 3 or A.dim() != 2 or len(A) != u.shape[1]:
        raise ValueError(
            f"u has shape {tuple(u.shape)} and A {tuple(A.shape)}; "
            "expected (batch, channels, length) and (channels, states)"
        )
    (batch, channels, length), states = u.shape, A.shape[1]
    shapes = {
        "delta": (delta, u.shape),
        "D": (D, (channels,)),
        "z": (z, u.shape),
        "delta_bias": (delta_bias, (channels,)),
        "initial_state": (initial_state, (batch, channels, states)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
    counts = [matrix.shape[1] if matrix.dim() == 4 else 1 for matrix in (B, C)]
    for name, matrix, count in zip("BC", (B, C), counts, strict=True):
        allowed = [(channels, states), (batch, states, length)]
        if count and channels % count == 0:
            allowed.append((batch, count, states, length))
        if tuple(matrix.shape) not in allowed:
            raise ValueError(
                f"{name} has shape {tuple(matrix.shape)}; expected {allowed[0]}, {allowed[1]} "
                f"or ({batch}, groups, {states}, {length}) with groups that divide {channels}"
            )
    if 1 not in counts and counts[0] != counts[1]:
        raise ValueError(f"B has {counts[0]} groups and C {counts[1]}; expected the same number")
