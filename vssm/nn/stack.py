"""The layers that blocks and models share, the embeddings of inputs, and the stack.

    y_{1:T}, h_T = stack(x_{1:T}, h_0)

A stack is an input projection, residual pre-norm blocks, a final norm and an output projection.
Three kinds of input are embedded: real vectors (B, T, D), tokens (B, T), and latents, given as
classes (B, T, Z) or as one-hot vectors (B, T, Z, N) through which gradients flow. A stack may also
own one `blank`, a learned input: the start of a sequence or the paper's empty token ∅.

On a CPU the layers are those of PyTorch. On CUDA, `vssm.ops` has faster kernels for them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vssm.config import ModelConfig
from vssm.nn.state import State
from vssm.ops.draws import embed_sum
from vssm.ops.linear import linear
from vssm.ops.operators import product_dtype

BLOCKS: dict[str, type[nn.Module]] = {}
"""The blocks by name; `vssm.nn` fills this table, because blocks are made of the layers here."""


def first_weight(model: nn.Module) -> Tensor:
    """Returns a weight of the model, for its device and dtype."""
    return next(model.parameters())


class Linear(nn.Linear):
    """Creates an `nn.Linear` that is fast without gradients on CUDA; parameters and results are the
    same.

    Example:
        >>> layer, x = Linear(3, 2), torch.ones(4, 3)
        >>> torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., K) to (..., N)."""
        return linear(x, self.weight, self.bias) if x.is_cuda else super().forward(x)


class StepSizes(nn.Linear):
    """Creates a linear layer whose bias the scan adds: bfloat16 would round small steps away."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., rank) to (..., inner), without the bias."""
        return linear(x, self.weight) if x.is_cuda else F.linear(x, self.weight)


def apply_in_halves(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Applies a linear layer and returns the two halves of its result.

    Training on CUDA multiplies once for each half: the gradients of the halves are then not copied
    into one matrix. A layer of another class (LoRA) or with a hook is called as it is.

    Example:
        >>> u, z = apply_in_halves(Linear(3, 4), torch.ones(5, 3))
        >>> u.shape, z.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    if torch.is_grad_enabled() and x.is_cuda and type(layer) is Linear and not hooked:
        first, second = layer.weight.unflatten(0, (2, -1)).unbind()
        return F.linear(x, first), F.linear(x, second)
    u, z = layer(x).chunk(2, -1)
    return u, z


class RMSNorm(nn.RMSNorm):
    """Creates an `nn.RMSNorm` for use before a matrix product; parameter and results are the same.

    Under autocast the result has the dtype of that product, and is cast once for several products.

    Example:
        >>> RMSNorm(3, eps=1e-5)(torch.tensor([[1.0, 1.0, -1.0]])).detach()
        tensor([[ 1.0000,  1.0000, -1.0000]])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (..., D) to (..., D)."""
        y = super().forward(x)
        return y.to(product_dtype(x.device)) if torch.is_autocast_enabled(x.device.type) else y


def embedding(config: ModelConfig) -> nn.Module:
    """Returns the input projection for x: a linear map, or a table for tokens."""
    if config.head == "categorical":
        return nn.Embedding(config.features, config.width)
    return _Projection(config.features, config.width)


class _Projection(nn.Linear):
    """A linear map for data and samples, which are float32 whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LatentEmbedding(nn.Module):
    """Creates the linear map of Z one-hot vectors of N classes to the width.

    Classes are looked up and summed; one-hot vectors are multiplied, so that they get a gradient.
    """

    def __init__(self, latents: int, classes: int, width: int) -> None:
        super().__init__()
        # Z rows are summed: this scale gives the sum unit variance.
        self.weight: nn.Parameter = nn.Parameter(
            torch.randn(latents * classes, width) / math.sqrt(latents)
        )
        self.latents: int = latents
        self.classes: int = classes

    def forward(self, z: Tensor) -> Tensor:
        """Maps z, (B, T, Z) classes or (B, T, Z, N) one-hot, to (B, T, width)."""
        if z.is_floating_point():
            if not torch.is_autocast_enabled(z.device.type):  # draws are always float32
                z = z.to(self.weight.dtype)
            return z.flatten(-2) @ self.weight
        assert z.shape[-1] == self.latents, f"z has {z.shape[-1]} latents, not {self.latents}"
        return embed_sum(z, self.weight)


class Stack(nn.Module):
    """Creates a stack of `config.layers` blocks.

    Arguments:
        config: The model.
        embed: The input projection, a module that maps the input to (B, T, width).
        outputs: The number of outputs of every step.
        blank: Whether the stack owns a learned blank input.
    """

    def __init__(
        self, config: ModelConfig, embed: nn.Module, outputs: int, blank: bool = False
    ) -> None:
        super().__init__()
        attention = config.block == "attention"
        self.embed = embed
        self.blank: nn.Parameter | None = (
            nn.Parameter(torch.randn(config.width) * 0.02) if blank else None
        )
        self.blocks: nn.ModuleList = nn.ModuleList(
            BLOCKS[config.block](config) for _ in range(config.layers)
        )
        self.norm: nn.LayerNorm | RMSNorm = (nn.LayerNorm if attention else RMSNorm)(
            config.width, eps=1e-5
        )
        self.out: Linear = Linear(config.width, outputs)
        self.positional = attention  # a recurrence knows where it is, attention does not

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Maps the input of T steps to (B, T, outputs) and returns the state after them."""
        return self.run(self.embed(x), state)

    def run(self, e: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Runs the blocks on inputs that are already embedded, e (B, T, width)."""
        position, length = 0 if state is None else state.position, e.shape[1]
        if torch.is_autocast_enabled(e.device.type):
            e = e.float()  # the blocks add to it: a bfloat16 sum would round away what they add
        if self.positional:
            e = e + sinusoids(position, length, e.shape[2], e.device, e.dtype)
        children: dict[str, Tensor | State] = {}
        for i, block in enumerate(self.blocks):
            e, children[str(i)] = block(e, None if state is None else state.child(str(i)))
        return self.out(self.norm(e)), State(children, position + length)

    def blanks(self, batch: int, length: int) -> Tensor:
        """Returns the learned blank input, embedded, (B, length, width)."""
        assert self.blank is not None
        return self.blank.expand(batch, length, -1)


def sinusoids(
    position: int, length: int, width: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the position code of Vaswani et al. (2017), (length, width): any length, no
    parameters.
    """
    rates = torch.exp(
        torch.arange(0, width, 2, dtype=torch.float32, device=device) * (-math.log(10000.0) / width)
    )
    angles = torch.arange(position, position + length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :width].to(dtype)
