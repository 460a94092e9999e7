"""Runs the Mamba and FalconMamba models of transformers on the kernels of this package.

    handle = vssm.accelerate(model)      # from now on the model trains and generates faster
    handle.undo()                        # from now on it runs its own code again

The `forward` of every mixer and of every `nn.Linear` of the model is replaced, and nothing else:
weights, caches, arguments and results are those of transformers. A mixer computes

    (u, z) = in_proj(x)      u = silu(conv1d(u))      (dt, B, C) = x_proj(u)      out_proj(y)

with y of the selective scan. FalconMamba normalises dt, B and C first. x and u are zero where a
batch is padded. A cache keeps the last K inputs of the convolution of K taps, (B, D, K), and the
state of the scan, (B, D, N).
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vssm.ops import causal_conv_silu, selective_scan
from vssm.ops.onednn import multiply

_MIXERS = (
    "transformers.models.mamba.modeling_mamba.MambaMixer",
    "transformers.models.falcon_mamba.modeling_falcon_mamba.FalconMambaMixer",
)


class Acceleration:
    """The modules that run on our kernels; leaving its `with` block undoes it."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules

    def undo(self) -> None:
        """Gives the modules their own `forward` back."""
        for module in self.modules:
            if _is_accelerated(module):
                del module.forward

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def accelerate(model: nn.Module) -> Acceleration:
    """Makes a Mamba or FalconMamba model of transformers run on the kernels of this package.

    Training, prompts, decoding with a cache and padded batches give the results of transformers'
    own code, up to rounding. One result differs: several tokens that follow a cache continue from
    its state, as the documentation of transformers says; its own code starts from zero.

    Arguments:
        model: The model, or a module that contains one. It may be accelerated already.

    Returns:
        A handle whose `undo()` restores the model. It is also a context manager.

    Example:
        >>> import vssm
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> config = MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=2, state_size=4)
        >>> model = MambaForCausalLM(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> slow = model(tokens).logits
        >>> with vssm.accelerate(model):
        ...     fast = model(tokens).logits
        >>> torch.allclose(fast, slow, atol=1e-5)
        True
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    mixers = [module for module in modules if _name_of_class(module) in _MIXERS]
    if not mixers:
        raise ValueError(
            f"model is {type(model).__name__}; expected a Mamba or FalconMamba of transformers"
        )
    _check_version()
    for mixer in mixers:
        _check_mixer(mixer)
    layers = [m for m in modules if type(m) is nn.Linear and not _is_replaced_by_others(m)]
    for mixer in mixers:
        mixer.forward = MethodType(_run_mixer, mixer)
    for layer in layers:
        layer.forward = MethodType(_run_linear, layer)
    return Acceleration(mixers + layers)


def _run_mixer(
    mixer: Any,  # noqa: ANN401
    hidden_states: Tensor,
    cache_params: Any = None,  # noqa: ANN401
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Replaces the `forward` of a mixer, with its arguments; maps (B, T, W) to (B, T, W)."""
    x, length, layer = hidden_states, hidden_states.shape[1], mixer.layer_idx
    rank, states, taps = mixer.time_step_rank, mixer.ssm_state_size, mixer.conv_kernel_size
    padding = None if attention_mask is None else attention_mask.unsqueeze(-1) == 0
    # Read first: the convolution's update of the cache makes it say that there is a state.
    h0 = None if cache_params is None else _recurrent_state(cache_params, layer)
    if padding is not None:
        x = x.masked_fill(padding, 0)
    u, z = mixer.in_proj(x).chunk(2, -1)
    if cache_params is not None:  # returns u with the inputs before it, if there are any
        u = cache_params.update_conv_state(u.mT, layer, conv_kernel_size=taps).mT
    weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    u = causal_conv_silu(u, weight, bias)[0][:, -length:]
    if padding is not None:
        u = u.masked_fill(padding, 0)
    dt, B, C = mixer.x_proj(u).split([rank, states, states], -1)
    if hasattr(mixer, "dt_layernorm"):  # FalconMamba
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    dt, dt_bias = multiply(dt, mixer.dt_proj.weight), mixer.dt_proj.bias
    A = -torch.exp(mixer.A_log.float())
    y, h = selective_scan(u, dt, A, B, C, mixer.D, z, dt_bias, softplus=True, h0=h0)
    if cache_params is not None:
        cache_params.update_recurrent_state(h, layer)
    return mixer.out_proj(y)


def _recurrent_state(cache: Any, layer: int) -> Tensor | None:  # noqa: ANN401
    """Returns the state that a cache holds for a layer; None before the first call."""
    if hasattr(cache, "get_recurrent_state"):  # transformers 5.21
        return cache.get_recurrent_state(layer)
    return cache.layers[layer].recurrent_states[0] if cache.has_previous_state(layer) else None


def _run_linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """Replaces the `forward` of a linear layer."""
    return multiply(input, layer.weight, layer.bias)


def _check_version() -> None:
    """Raises `ValueError` if caches of the installed transformers have another interface."""
    import transformers

    installed = transformers.__version__
    if tuple(map(int, installed.split(".")[:2])) < (5, 17):
        raise ValueError(f"transformers is {installed}; vssm.accelerate needs 5.17 or later")


def _check_mixer(mixer: Any) -> None:  # noqa: ANN401
    """Raises `ValueError` if the kernels cannot do what a mixer does."""
    if mixer.activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {mixer.activation!r}; vssm.accelerate needs 'silu'")
    if not mixer.dt_proj.weight.is_floating_point():
        raise ValueError(
            f"the weights are quantised to {mixer.dt_proj.weight.dtype}; "
            "vssm.accelerate needs floating-point weights"
        )
    if _is_replaced_by_others(mixer):
        raise ValueError(
            "a mixer's forward was replaced already, for example by device_map; "
            "load the model onto one device"
        )


def _is_accelerated(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) in (_run_mixer, _run_linear)


def _is_replaced_by_others(module: nn.Module) -> bool:
    return "forward" in vars(module) and not _is_accelerated(module)


def _name_of_class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
