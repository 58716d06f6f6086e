"""The transformer block that networks for pictures and for text are made of."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor, nn

from leyden.nets.plan import Plan

Count = Annotated[int, Ge(1)]
DropoutFrac = Annotated[float, Ge(0.0), Lt(1.0)]


class TransformerBlock(nn.Module):
    """Pre-norm self-attention followed by a pre-norm MLP, each with a skip connection.

    Shape:
        features (B, L, embed_dim), keys (B, 1, 1, L) bool, true where a key may be attended to (None: everywhere)
        -> (B, L, embed_dim), same dtype.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, with the normalisation first as in
    https://arxiv.org/abs/2002.04745.
    """

    def __init__(self, embed_dim: Count, num_heads: Count, mlp_dim: Count, dropout: DropoutFrac) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.attention_out = nn.Linear(embed_dim, embed_dim)
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_dim, embed_dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, keys: Tensor | None = None) -> Tensor:
        features = features + self.dropout(self._attend(self.attention_norm(features), keys))
        mixed: Tensor = features + self.dropout(self.mlp(self.mlp_norm(features)))
        return mixed

    def _attend(self, features: Tensor, keys: Tensor | None) -> Tensor:
        qkv: Tensor = self.qkv(features)
        # (B, L, 3D) -> three of (B, heads, L, D / heads); with tensor parallel the heads are those of this process
        query, key, value = qkv.unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        out: Tensor = self.attention_out(attended.transpose(1, 2).flatten(2))
        return out

    def parallel_plan(self) -> Plan:
        """Whole heads to each process, and a part of the MLP's width."""
        return {"qkv": "qkv", "attention_out": "row", "mlp.0": "column", "mlp.2": "dropout", "mlp.3": "row"}


def plan_blocks(name: str, blocks: nn.Module) -> Plan:
    """The plan of a network that has transformer blocks as the children of its module `name`."""
    return {
        f"{name}.{number}.{module}": cut
        for number, block in blocks.named_children()
        if isinstance(block, TransformerBlock)
        for module, cut in block.parallel_plan().items()
    }
