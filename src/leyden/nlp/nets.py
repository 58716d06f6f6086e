"""Networks that map a batch of character ids to class logits.

Belongs here: plain `nn.Module`s with `tokens (B, L) int64 -> logits (B, num_classes) float`, whose
constructor arguments are config keys. Does not belong here: vocabularies, losses, metrics and anything that
knows a trainer. The output layer of every network is called `head`; embeddings have `embed` in their names.

Token id 0 is padding and comes only at the end of a row, 1 is an unknown character, real characters start
at 2. The logits of a row depend neither on the other rows nor on how far the batch is padded, and are finite
for a row without characters.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Lt, MinLen
from torch import Tensor, nn

from leyden.errors import ConfigError
from leyden.nets.plan import Plan
from leyden.nets.transformer import TransformerBlock, plan_blocks

Count = Annotated[int, Ge(1)]
DropoutFrac = Annotated[float, Ge(0.0), Lt(1.0)]

PADDING = 0
HASH_MULTIPLIER = 1_000_003
HASH_MODULUS = 2**31 - 1  # prime; products of two residues stay below 2**62, so int64 never overflows


def compute_ngram_buckets(tokens: Tensor, max_ngram: int, num_buckets: int, boundary: int) -> Tensor:
    """Hash every n-gram of 1 to `max_ngram` characters of each row to a bucket.

    A boundary mark is set before the first and after the last character, so n-grams at the ends of a text
    differ from those inside it. The mark alone is no n-gram. A hash starts at 0 and takes one id after the
    other, `hash = (hash * HASH_MULTIPLIER + id + 1) % HASH_MODULUS`; its bucket is
    `1 + hash % (num_buckets - 1)`.

    Args:
        tokens: Character ids, 0 for padding at the end of a row.
        max_ngram: Longest n-gram, in characters, marks included.
        num_buckets: Number of buckets; bucket 0 stands for "no n-gram here".
        boundary: Id of the mark, one that no character has.

    Shape:
        tokens (B, L) int64 -> buckets (B, K) int64 in 0..num_buckets - 1; K is the sum of max(0, L + 3 - n)
        over the lengths n.
    """
    length = tokens.shape[1]
    lengths = (tokens != PADDING).sum(dim=1, keepdim=True)
    positions = torch.arange(length + 2, device=tokens.device)
    marked = F.pad(tokens, (1, 1)).masked_fill((positions == 0) | (positions == lengths + 1), boundary)
    hashes = torch.zeros_like(marked)
    buckets = []
    for order in range(1, min(max_ngram, length + 2) + 1):
        starts = length + 3 - order
        hashes = (hashes[:, :starts] * HASH_MULTIPLIER + marked[:, order - 1 :] + 1) % HASH_MODULUS
        begin = positions[:starts]
        present = (begin + order <= lengths + 2) & (lengths > 0)
        if order == 1:
            present = present & (begin >= 1) & (begin <= lengths)
        buckets.append((1 + hashes % (num_buckets - 1)).masked_fill(~present, 0))
    return torch.cat(buckets, dim=1)


class NgramBag(nn.Module):
    """Bag of hashed character n-grams: summed embeddings, linear head.

    The sum is divided by the square root of the number of n-grams, so long and short texts have a like scale.

    Shape:
        tokens (B, L) int64 -> logits (B, num_classes) float. Inside: pooled (B, embed_dim).

    Args:
        num_classes: Number of logits.
        vocab_size: Number of character ids, padding and unknown included.
        max_ngram: Longest n-gram, in characters; the marks at both ends of the text count.
        num_buckets: Rows of the embedding table, which all n-grams share by hash.
        embed_dim: Width of an n-gram's embedding.
        hidden_dim: Width of a hidden ReLU layer before the head; 0 leaves it out.
        ngram_dropout: Share of the n-grams of a text that is left out in training, 0..1.
        dropout: Share of the pooled vector, and of the hidden layer, that is zeroed in training, 0..1.

    Source: Bojanowski et al. 2016, https://arxiv.org/abs/1607.04606 and Joulin et al. 2016,
    https://arxiv.org/abs/1607.01759.
    """

    def __init__(
        self,
        num_classes: Count,
        vocab_size: Annotated[int, Ge(2)],
        max_ngram: Count = 4,
        num_buckets: Annotated[int, Ge(2)] = 65_536,
        embed_dim: Count = 64,
        hidden_dim: Annotated[int, Ge(0)] = 0,
        ngram_dropout: DropoutFrac = 0.0,
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        self.boundary = vocab_size
        self.max_ngram = max_ngram
        self.num_buckets = num_buckets
        self.ngram_dropout = ngram_dropout
        self.ngram_embed = nn.EmbeddingBag(num_buckets, embed_dim, mode="sum", padding_idx=0)
        nn.init.normal_(self.ngram_embed.weight, std=0.01)
        layers: list[nn.Module] = [nn.Dropout(dropout)]
        if hidden_dim:
            layers += [nn.Linear(embed_dim, hidden_dim), nn.ReLU(), nn.Dropout(dropout)]
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(hidden_dim or embed_dim, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        buckets = compute_ngram_buckets(tokens, self.max_ngram, self.num_buckets, self.boundary)
        if self.training and self.ngram_dropout:
            dropped = torch.rand(buckets.shape, device=buckets.device) < self.ngram_dropout
            buckets = buckets.masked_fill(dropped, 0)
        number = (buckets != 0).sum(dim=1, keepdim=True).clamp(min=1)
        pooled = self.ngram_embed(buckets)
        logits: Tensor = self.head(self.hidden(pooled * number.to(pooled.dtype).rsqrt()))
        return logits


class CharCNN(nn.Module):
    """Character embeddings, convolutions of several widths side by side, maximum over positions, linear head.

    Shape:
        tokens (B, L) int64 -> logits (B, num_classes) float. Inside: features (B, channels, L) a kernel size.

    Args:
        num_classes: Number of logits.
        vocab_size: Number of character ids, padding and unknown included.
        embed_dim: Width of a character's embedding.
        channels: Filters of each kernel size.
        kernel_sizes: Widths of the filters, in characters.
        dropout: Share of the embeddings and of the pooled features that is zeroed in training, 0..1.

    Raises:
        ConfigError: `kernel_sizes` is empty or holds a number below 1.

    Source: Kim 2014, https://arxiv.org/abs/1408.5882, on characters.
    """

    def __init__(
        self,
        num_classes: Count,
        vocab_size: Annotated[int, Ge(2)],
        embed_dim: Count = 32,
        channels: Count = 128,
        kernel_sizes: Annotated[Sequence[Count], MinLen(1)] = (2, 3, 4, 5),
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        if not kernel_sizes or min(kernel_sizes) < 1:
            raise ConfigError(
                f"`model.net.kernel_sizes` must name at least one filter width, got {list(kernel_sizes)}. "
                "Allowed: a non-empty list of whole numbers from 1. Set it to, say, [2, 3, 4, 5]."
            )
        self.char_embed = nn.Embedding(vocab_size, embed_dim, padding_idx=PADDING)
        self.kernel_sizes = tuple(kernel_sizes)
        self.convs = nn.ModuleList(nn.Conv1d(embed_dim, channels, size) for size in kernel_sizes)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels * len(kernel_sizes), num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = _widen_empty(tokens)
        present = (tokens != PADDING).unsqueeze(1)
        features = self.dropout(self.char_embed(tokens)).transpose(1, 2) * present
        pooled = []
        for size, conv in zip(self.kernel_sizes, self.convs, strict=True):
            left = (size - 1) // 2
            response = F.relu(conv(F.pad(features, (left, size - 1 - left))))
            # Zero is the smallest value after ReLU, so it never wins over a real position.
            pooled.append((response * present).amax(dim=2))
        logits: Tensor = self.head(self.dropout(torch.cat(pooled, dim=1)))
        return logits


class TransformerEncoder(nn.Module):
    """Small pre-norm transformer over characters: learned positions, mean over the text, linear head.

    Characters after the first `max_length` are ignored.

    Shape:
        tokens (B, L) int64 -> logits (B, num_classes) float.
        Inside: features (B, min(L, max_length), embed_dim).

    Args:
        num_classes: Number of logits.
        vocab_size: Number of character ids, padding and unknown included.
        max_length: Number of positions that are learned.
        embed_dim: Width of a character's features; must be a multiple of `num_heads`.
        depth: Number of transformer blocks.
        num_heads: Attention heads of a block.
        mlp_ratio: Width of a block's MLP as a multiple of `embed_dim`.
        stem_kernel_size: Characters seen by a convolution with a skip connection before the blocks; 1 leaves it
            out. Neighbouring characters say much more than far ones, which attention must learn first.
        dropout: Share zeroed in training on embeddings, on residual branches and inside the MLPs, 0..1.

    Raises:
        ConfigError: `num_heads` does not divide `embed_dim`.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, encoder only, with mean pooling.
    """

    repeated_blocks: ClassVar[str] = "blocks"

    def __init__(
        self,
        num_classes: Count,
        vocab_size: Annotated[int, Ge(2)],
        max_length: Count = 64,
        embed_dim: Count = 64,
        depth: Count = 2,
        num_heads: Count = 4,
        mlp_ratio: Annotated[float, Gt(0.0)] = 2.0,
        stem_kernel_size: Count = 1,
        dropout: DropoutFrac = 0.0,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads != 0:
            divisors = [number for number in range(1, embed_dim + 1) if embed_dim % number == 0]
            raise ConfigError(
                f"`model.net.embed_dim` must be a multiple of `model.net.num_heads`, got {embed_dim} with "
                f"model.net.num_heads={num_heads}. Allowed num_heads for {embed_dim}: {divisors}. Change "
                f"num_heads, or set embed_dim to {num_heads * max(1, round(embed_dim / num_heads))}."
            )
        self.max_length = max_length
        self.char_embed = nn.Embedding(vocab_size, embed_dim, padding_idx=PADDING)
        nn.init.normal_(self.char_embed.weight, std=0.5)
        self.position_embed = nn.Parameter(torch.empty(1, max_length, embed_dim))
        nn.init.trunc_normal_(self.position_embed, std=0.1)
        self.stem = nn.Conv1d(embed_dim, embed_dim, stem_kernel_size) if stem_kernel_size > 1 else None
        self.stem_padding = ((stem_kernel_size - 1) // 2, stem_kernel_size // 2)
        self.dropout = nn.Dropout(dropout)
        mlp_dim = max(1, round(embed_dim * mlp_ratio))
        self.blocks = nn.ModuleList(TransformerBlock(embed_dim, num_heads, mlp_dim, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = _widen_empty(tokens[:, : self.max_length])
        present = tokens != PADDING
        # A row without characters attends to its first position, as a softmax over nothing is not finite.
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        keys = (present | first)[:, None, None, :]
        weights = present.unsqueeze(2).to(self.position_embed.dtype)
        features = self.dropout(self.char_embed(tokens) + self.position_embed[:, : tokens.shape[1]])
        if self.stem is not None:
            window = F.pad((features * weights).transpose(1, 2), self.stem_padding)
            features = features + F.gelu(self.stem(window)).transpose(1, 2)
        for block in self.blocks:
            features = block(features, keys)
        pooled = (self.norm(features) * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        logits: Tensor = self.head(pooled)
        return logits

    def parallel_plan(self) -> Plan:
        """How tensor parallel training cuts it: attention by heads, MLPs by their width."""
        return plan_blocks("blocks", self.blocks)


def _widen_empty(tokens: Tensor) -> Tensor:
    """Give a batch of length 0 one column of padding, as convolutions and attention need a position."""
    return tokens if tokens.shape[1] else F.pad(tokens, (0, 1))
