"""The transformer: exact shapes, causal, and clear about what it cannot take."""

import math
from dataclasses import replace

import pytest
import torch

from companion.model import MODELS, ModelConfig, Transformer, next_token_loss, parameter_count

SMALL = ModelConfig(vocabulary=11, context=16, layers=2, width=16, heads=4, kv_heads=2, hidden=24)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 955_776),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_published_parameter_counts(name, count):
    with torch.device("meta"):
        assert parameter_count(Transformer(MODELS[name])) == count


def test_preset_sizes():
    with torch.device("meta"):
        assert 9e6 < parameter_count(Transformer(MODELS["small"])) < 12e6
        assert 115e6 < parameter_count(Transformer(MODELS["gpt2"])) < 130e6


def test_causal_and_position_aware():
    torch.manual_seed(0)
    model = Transformer(SMALL)
    tokens = torch.randint(0, 11, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])
    swapped = tokens.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    assert not torch.allclose(model(swapped)[:, -1], a[:, -1], atol=1e-6)


def test_rotary_positions_are_relative():
    """A dot product of two rotated vectors depends on their distance only (Su et al. 2021)."""
    from companion.model import rotary_tables, rotate

    cos, sin = rotary_tables(SMALL)
    q, k = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4)

    def dot(i, j):
        return (
            rotate(q, cos[i : i + 1], sin[i : i + 1]) * rotate(k, cos[j : j + 1], sin[j : j + 1])
        ).sum()

    torch.testing.assert_close(dot(3, 1), dot(9, 7))
    assert not torch.isclose(dot(3, 1), dot(9, 5))


def test_loss_starts_at_uniform_and_is_summed():
    torch.manual_seed(0)
    model = Transformer(SMALL)
    batch = torch.randint(0, 11, (3, 8)), torch.randint(0, 11, (3, 8))
    assert next_token_loss(model, batch).item() / 24 == pytest.approx(math.log(11), abs=0.1)
    batch[1][0] = -100
    fewer = next_token_loss(model, batch).item()
    assert fewer / 16 == pytest.approx(math.log(11), abs=0.1)


def test_tied_head_is_one_weight():
    model = Transformer(SMALL)
    assert model.head.weight is model.embedding.weight
    assert Transformer(replace(SMALL, tied=False)).head.weight.shape == (11, 16)


def test_rotary_tables_are_not_saved():
    assert not [key for key in Transformer(SMALL).state_dict() if key in ("cos", "sin")]


def test_sequence_longer_than_context():
    with pytest.raises(ValueError, match="17 tokens, the model's context is 16"):
        Transformer(SMALL)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "multiple of kv_heads"),
        ({"width": 20}, "multiple of 2 × heads"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_impossible_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)
