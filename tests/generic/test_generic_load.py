"""Names, tied weights and the check against transformers' own attention that follows loading."""

from __future__ import annotations

import pytest
import torch
from qiao.errors import ModelError
from qiao.models import generic_attention as routes
from qiao.models.generic import create_generic

from tests.support.generic import PagedRunner, random_model, reference_ops, tiny_config


def _logits(model: object) -> torch.Tensor:
    return PagedRunner(model, reference_ops()).step({"a": [3, 4, 5, 6]})["a"]  # type: ignore[arg-type]


def _loaded(config: object, weights: dict[str, torch.Tensor]) -> object:
    model = create_generic(config, reference_ops(), torch.float32)  # type: ignore[arg-type]
    model.load(weights.items())
    return model


def test_missing_tensor_is_named() -> None:
    config = tiny_config("gpt_neox")
    weights = random_model(config).state_dict()
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    with pytest.raises(ModelError, match=r"gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight"):
        _loaded(config, weights)


def test_missing_bias_is_named() -> None:
    config = tiny_config("gpt_neox")
    weights = random_model(config).state_dict()
    del weights["gpt_neox.layers.0.attention.dense.bias"]
    with pytest.raises(ModelError, match=r"attention\.dense\.bias"):
        _loaded(config, weights)


def test_unexpected_tensor_is_named() -> None:
    config = tiny_config("gpt_neox")
    weights = {**random_model(config).state_dict(), "gpt_neox.adapter.weight": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"gpt_neox\.adapter\.weight"):
        _loaded(config, weights)


@pytest.mark.parametrize("name", ["gpt_neox.embed_in.weight", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"])
def test_wrong_shape_is_named(name: str) -> None:
    config = tiny_config("gpt_neox")
    weights = random_model(config).state_dict()
    weights[name] = weights[name][:-1]
    with pytest.raises(ModelError, match=name):
        _loaded(config, weights)


def test_old_buffers_in_a_checkpoint_are_ignored() -> None:
    config = tiny_config("gpt_neox")
    weights = random_model(config).state_dict()
    extra = {
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(8),
        "gpt_neox.layers.0.attention.masked_bias": torch.ones(1),
    }
    torch.testing.assert_close(_logits(_loaded(config, {**weights, **extra})), _logits(_loaded(config, weights)))


def test_names_without_the_decoders_prefix() -> None:
    config = tiny_config("gpt2")
    theirs = random_model(config)
    bare = {n.removeprefix("transformer."): t for n, t in theirs.state_dict().items() if not n.startswith("lm_head")}
    torch.testing.assert_close(_logits(_loaded(config, bare)), _logits(_loaded(config, theirs.state_dict())))


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_of_two_tied_tensors_suffices(kept: str) -> None:
    config = tiny_config("starcoder2", tie_word_embeddings=True)
    theirs = random_model(config)
    weights = theirs.state_dict()
    del weights[{"lm_head.weight": "model.embed_tokens.weight"}.get(kept, "lm_head.weight")]
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0]
    torch.testing.assert_close(_logits(_loaded(config, weights)), wanted, atol=1e-4, rtol=1e-4)


def test_half_precision_checkpoint_into_float32() -> None:
    config = tiny_config("gpt_neox")
    theirs = random_model(config).half().float()
    weights = {n: t.half() for n, t in theirs.state_dict().items()}
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0]
    torch.testing.assert_close(_logits(_loaded(config, weights)), wanted, atol=1e-4, rtol=1e-4)


class _Smear(torch.nn.Module):
    """A layer norm that also lets each token see the one before it: state that no cache holds."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1))


def test_hidden_state_between_tokens_is_found_after_loading() -> None:
    config = tiny_config("gpt_neox")
    weights = random_model(config).state_dict()
    model = create_generic(config, reference_ops(), torch.float32)
    model.load(weights.items())
    layer = model._decoder.layers[0]
    layer.input_layernorm = _Smear(layer.input_layernorm)
    with pytest.raises(ModelError, match="state"):
        model._check_against_own_attention()


def test_the_check_passes_on_a_sound_model_and_fails_on_a_wrong_window() -> None:
    config = tiny_config("starcoder2", sliding_window=3)
    model = create_generic(config, reference_ops(), torch.float32)
    model.load(random_model(config).state_dict().items())
    model._check_against_own_attention()
    import dataclasses

    model._calls = tuple(dataclasses.replace(c, sliding_window=0) for c in model._calls)
    with pytest.raises(ModelError, match="difference"):
        model._check_against_own_attention()


def test_masks_that_are_neither_causal_nor_a_window() -> None:
    def causal(b: int, h: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q

    assert routes.window_of(causal, None) == 0
    assert routes.window_of(lambda b, h, q, k: (k <= q) & (k > q - 4), 4) == 4
    assert routes.window_of(lambda b, h, q, k: (k <= q) & (k // 4 == q // 4), 4) < 0
    assert routes.window_of(lambda b, h, q, k: k >= 0, None) < 0
    assert routes.window_of(lambda b, h, q, k: (k <= q) & (k > q - 5), 4) < 0


def test_no_mask_of_the_batchs_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("olmo3", sliding_window=5)
    model = create_generic(config, reference_ops(), torch.float32)
    model.load(random_model(config).state_dict().items())
    from transformers import masking_utils

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a mask was made")

    for name in ("sdpa_mask", "eager_mask"):
        monkeypatch.setattr(masking_utils, name, fail)
    _logits(model)


def test_two_models_do_not_share_state() -> None:
    first, second = tiny_config("gpt_neox"), tiny_config("gpt2")
    a, b = (_loaded(c, random_model(c).state_dict()) for c in (first, second))
    alone = _logits(a)
    _logits(b)
    torch.testing.assert_close(_logits(a), alone)
