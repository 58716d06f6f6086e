"""Text networks: n-gram hashes against a plain loop, padding, independence of rows, gradients, errors."""

import pytest
import torch
from torch import Tensor, nn

from leyden.errors import ConfigError
from leyden.nlp.nets import CharCNN, NgramBag, TransformerEncoder, compute_ngram_buckets

VOCAB_SIZE = 30
NUM_CLASSES = 7


def build_nets(dropout: float = 0.0) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    sizes = {"num_classes": NUM_CLASSES, "vocab_size": VOCAB_SIZE}
    return {
        "ngram_bag": NgramBag(**sizes, num_buckets=101, embed_dim=8, dropout=dropout),
        "ngram_bag_hidden": NgramBag(**sizes, num_buckets=101, embed_dim=8, hidden_dim=6, ngram_dropout=dropout),
        "char_cnn": CharCNN(**sizes, embed_dim=8, channels=6, kernel_sizes=(1, 2, 3, 8), dropout=dropout),
        "transformer": TransformerEncoder(**sizes, max_length=16, embed_dim=8, num_heads=2, dropout=dropout),
        "transformer_stem": TransformerEncoder(
            **sizes, max_length=16, embed_dim=8, num_heads=2, depth=1, stem_kernel_size=4, dropout=dropout
        ),
    }


NAMES = sorted(build_nets())


def draw_tokens(lengths: list[int], width: int) -> Tensor:
    """Draw random characters. Returns tokens (len(lengths), width) int64, padded with 0."""
    tokens = torch.randint(1, VOCAB_SIZE, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    return tokens.masked_fill(torch.arange(width) >= torch.tensor(lengths).unsqueeze(1), 0)


def hash_slowly(row: list[int], max_ngram: int, num_buckets: int, boundary: int) -> list[int]:
    """Hash the n-grams of one text, without padding, one character at a time as the docstring says."""
    marked = [boundary, *row, boundary]
    buckets = []
    for order in range(1, max_ngram + 1):
        for begin in range(len(marked) - order + 1):
            gram = marked[begin : begin + order]
            if gram == [boundary]:
                continue
            value = 0
            for token in gram:
                value = (value * 1_000_003 + token + 1) % (2**31 - 1)
            buckets.append(1 + value % (num_buckets - 1))
    return buckets


@pytest.mark.parametrize("max_ngram", [1, 2, 4, 9])
@pytest.mark.parametrize("row", [[5], [5, 5], [2, 3, 4, 2, 3]])
def test_buckets_equal_those_of_a_plain_loop(row: list[int], max_ngram: int) -> None:
    num_buckets, boundary = 65_536, VOCAB_SIZE
    padded = torch.tensor([row + [0] * 3, [9] * (len(row) + 3)])
    buckets = compute_ngram_buckets(padded, max_ngram, num_buckets, boundary)[0]
    found = sorted(buckets[buckets != 0].tolist())
    assert found == sorted(hash_slowly(row, max_ngram, num_buckets, boundary))


def test_bucket_of_one_character_is_known_by_arithmetic() -> None:
    # One character of id 5, mark 30, 100 buckets. Unigram: 5 + 1 = 6 -> 1 + 6 % 99 = 7.
    # mark-5: (30 + 1) * 1,000,003 + 6 = 31,000,099 -> 1 + 31,000,099 % 99 = 1 + 31 = 32.
    # 5-mark: 6 * 1,000,003 + 31 = 6,000,049 -> 1 + 6,000,049 % 99 = 1 + 55 = 56.
    assert 99 * 313_132 + 31 == 31_000_099
    assert 99 * 60_606 + 55 == 6_000_049
    buckets = compute_ngram_buckets(torch.tensor([[5]]), max_ngram=2, num_buckets=100, boundary=30)
    assert buckets.tolist() == [[0, 7, 0, 32, 56]]


def test_buckets_tell_beginning_and_end_from_inside() -> None:
    first, last = torch.tensor([[2, 3, 3]]), torch.tensor([[3, 3, 2]])
    buckets = [set(compute_ngram_buckets(text, 2, 65_536, VOCAB_SIZE)[0].tolist()) for text in (first, last)]
    assert len(buckets[0] & buckets[1]) == 4  # shared: no n-gram (0), 2, 3 and 3-3; not the marks or 2-3 and 3-2


@pytest.mark.parametrize("width", [0, 1, 2, 16, 20])
@pytest.mark.parametrize("name", NAMES)
def test_logits_have_one_row_a_text_and_one_column_a_class(name: str, width: int) -> None:
    logits = build_nets()[name](draw_tokens([width, width // 2, 0], width))
    assert logits.shape == (3, NUM_CLASSES)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [4, 0, 9]])
@pytest.mark.parametrize("name", NAMES)
def test_empty_texts_are_finite_and_so_are_their_gradients(name: str, lengths: list[int], training: bool) -> None:
    net = build_nets()[name].train(training)
    logits = net(draw_tokens(lengths, 9))
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    empty = [row for row, length in zip(logits, lengths, strict=True) if length == 0]
    torch.testing.assert_close(torch.stack(empty), net(torch.zeros(len(empty), 2, dtype=torch.int64)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_logits_do_not_depend_on_the_padding(name: str, training: bool) -> None:
    net = build_nets()[name].train(training)
    for key, parameter in net.named_parameters():
        if key.endswith("embed.weight"):
            parameter.data[0] = 1.0  # zeros, the initial values, would hide padding that is read
    for length in (1, 2, 5):
        narrow = draw_tokens([length], length)
        wide = nn.functional.pad(narrow, (0, 15))
        torch.testing.assert_close(net(wide), net(narrow), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_row_alone_equals_row_in_batch(name: str) -> None:
    net = build_nets(dropout=0.5)[name].eval()
    tokens = draw_tokens([3, 12, 0, 7], 12)
    together = net(tokens)
    alone = torch.cat([net(row.unsqueeze(0)) for row in tokens])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0.0)
    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_order_of_the_characters_matters(name: str) -> None:
    net = build_nets()[name].eval()
    forth = draw_tokens([9], 9)
    assert (net(forth) - net(forth.flip(1))).abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name: str) -> None:
    net = build_nets()[name]
    net(draw_tokens([16, 15, 14], 16)).square().sum().backward()
    unreached = [key for key, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert unreached == []


@pytest.mark.parametrize("name", NAMES)
def test_output_layer_is_called_head_and_embeddings_have_embed_in_their_names(name: str) -> None:
    net = build_nets()[name]
    assert net.head.out_features == NUM_CLASSES
    embeddings = [key for key, m in net.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    assert len(embeddings) == 1
    assert "embed" in embeddings[0]


@pytest.mark.parametrize("name", NAMES)
def test_dropout_acts_in_training_only(name: str) -> None:
    net = build_nets(dropout=0.5)[name]
    tokens = draw_tokens([12, 12], 12)
    assert (net(tokens) - net(tokens)).abs().max() > 1e-3
    net.eval()
    torch.testing.assert_close(net(tokens), net(tokens))


def test_text_without_characters_has_no_ngrams() -> None:
    assert not compute_ngram_buckets(torch.zeros(2, 3, dtype=torch.int64), 4, 100, VOCAB_SIZE).any()


def test_padding_bucket_is_never_trained() -> None:
    net = build_nets()["ngram_bag"]
    net(draw_tokens([3, 0], 9)).sum().backward()
    assert not net.ngram_embed.weight.grad[0].any()


def test_every_attention_row_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    # A softmax over no key is NaN in some attention kernels and zero in others, so none may be asked for.
    masks = []
    attend = nn.functional.scaled_dot_product_attention

    def record(*inputs: Tensor, attn_mask: Tensor) -> Tensor:
        masks.append(attn_mask)
        return attend(*inputs, attn_mask=attn_mask)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", record)
    build_nets()["transformer"](draw_tokens([0, 3], 5))
    assert len(masks) == 2  # one a block
    assert masks[0][:, 0, 0].tolist() == [[True] + [False] * 4, [True] * 3 + [False] * 2]


def test_transformer_ignores_characters_after_max_length() -> None:
    net = build_nets()["transformer"].eval()
    tokens = draw_tokens([20], 20)
    torch.testing.assert_close(net(tokens), net(tokens[:, :16]))


def test_transformer_names_the_head_counts_that_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerEncoder(num_classes=2, vocab_size=9, embed_dim=10, num_heads=4)
    assert str(caught.value) == (
        "`model.net.embed_dim` must be a multiple of `model.net.num_heads`, got 10 with "
        "model.net.num_heads=4. Allowed num_heads for 10: [1, 2, 5, 10]. Change "
        "num_heads, or set embed_dim to 8."
    )


@pytest.mark.parametrize("kernel_sizes", [[], [3, 0]])
def test_char_cnn_names_the_kernel_sizes_it_was_given(kernel_sizes: list[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        CharCNN(num_classes=2, vocab_size=9, kernel_sizes=kernel_sizes)
    assert str(caught.value) == (
        f"`model.net.kernel_sizes` must name at least one filter width, got {kernel_sizes}. "
        "Allowed: a non-empty list of whole numbers from 1. Set it to, say, [2, 3, 4, 5]."
    )
