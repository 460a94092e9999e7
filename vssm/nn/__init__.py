"""Blocks, the stack, and the state that they carry."""

from vssm.nn.attention import AttentionBlock as AttentionBlock
from vssm.nn.attention import reserve as reserve
from vssm.nn.attention import trim as trim
from vssm.nn.gru import GRUBlock as GRUBlock
from vssm.nn.gru import join_weights as join_weights
from vssm.nn.mamba import MambaBlock as MambaBlock
from vssm.nn.mamba import MambaMixer as MambaMixer
from vssm.nn.stack import BLOCKS as BLOCKS
from vssm.nn.stack import LatentEmbedding as LatentEmbedding
from vssm.nn.stack import Linear as Linear
from vssm.nn.stack import RMSNorm as RMSNorm
from vssm.nn.stack import Stack as Stack
from vssm.nn.stack import embedding as embedding
from vssm.nn.stack import first_weight as first_weight
from vssm.nn.state import State as State

BLOCKS.update(mamba=MambaBlock, attention=AttentionBlock, gru=GRUBlock)
