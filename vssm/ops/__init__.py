"""Kernels: each op is one function with a plain PyTorch twin."""

from vssm.ops.conv import causal_conv_silu as causal_conv_silu
from vssm.ops.mamba_ssm import selective_scan_fn as selective_scan_fn
from vssm.ops.scan import BACKENDS as BACKENDS
from vssm.ops.scan import choose_backend as choose_backend
from vssm.ops.scan import selective_scan as selective_scan
