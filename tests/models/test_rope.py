"""Every rope kind and spelling against transformers, beyond the trained length where the kind is made for it."""

import copy

import pytest
import torch
import transformers
from qiao.errors import ModelError
from qiao.models import create, describe

from tests.models.families import BASE
from tests.support.models import Paged, build, cpu_ops, reference_model, token_ids

TRAINED = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-blend": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 7.0, "factor": 3.0},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-betas-no-truncate": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
}


def _close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def _wanted(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids]), use_cache=False).logits[0]


def _llama(scaling, **extra):
    values = {**BASE, "num_hidden_layers": 2, "rope_theta": 10000.0, **extra}
    if scaling is not None:
        values["rope_scaling"] = copy.deepcopy(scaling)
    return transformers.LlamaConfig(**values)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kinds_match_beyond_the_trained_length(kind):
    config = _llama(KINDS[kind])
    reference, ids = reference_model(config), token_ids(201, 128)
    model = build(config, reference.state_dict().items())
    paged = Paged(model)
    _close(torch.cat([paged.feed(ids[:90]), paged.feed(ids[90:200]), paged.feed(ids[200:])]), _wanted(reference, ids))


def test_the_kinds_differ_at_all():
    seen = []
    for kind in KINDS.values():
        config = _llama(kind)
        weights = reference_model(config).state_dict().items()
        seen.append(Paged(build(config, weights)).feed(token_ids(200, 128))[-1])
    gaps = [float((a - b).abs().max()) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 1e-2


class TestDynamic:
    """One frequency for all positions, that of the longest sequence served: what makes cached prefixes shareable."""

    config = staticmethod(lambda: _llama({"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=TRAINED))

    def test_context_is_the_extended_one(self):
        assert describe(self.config()).max_position == 2 * TRAINED

    def test_full_length_equals_the_reference(self):
        config = self.config()
        reference, ids = reference_model(config), token_ids(2 * TRAINED, 128)
        _close(Paged(build(config, reference.state_dict().items())).feed(ids), _wanted(reference, ids))

    def test_between_the_lengths_equals_the_reference_after_it_saw_the_full_length(self):
        config = self.config()
        reference, ids = reference_model(config), token_ids(2 * TRAINED, 128)
        _wanted(reference, ids)  # transformers keeps the frequencies of the longest sequence seen
        paged = Paged(build(config, reference.state_dict().items()))
        got = torch.cat([paged.feed(ids[:70]), *(paged.feed([t]) for t in ids[70:100])])
        _close(got, _wanted(reference, ids[:100]))

    def test_served_within_the_trained_length_equals_the_reference(self):
        config = self.config()
        reference, ids = reference_model(config), token_ids(50, 128)
        model = build(config, reference.state_dict().items(), max_length=TRAINED)
        _close(Paged(model).feed(ids), _wanted(reference, ids))


class TestLongRope:
    """Short or long factors by the longest sequence served, as vLLM decides; never a mix within one cache."""

    @staticmethod
    def config(**extra):
        values = {**BASE, "num_hidden_layers": 2, "original_max_position_embeddings": TRAINED, **extra}
        return transformers.Phi3Config(**values, rope_scaling=copy.deepcopy(LONG))

    @pytest.mark.parametrize("extra", [{}, {"max_position_embeddings": 128}])
    def test_long(self, extra):
        config = self.config(**extra)
        reference, ids = reference_model(config), token_ids(100, 128)
        paged = Paged(build(config, reference.state_dict().items()))
        _close(torch.cat([paged.feed(ids[:30]), paged.feed(ids[30:])]), _wanted(reference, ids))

    def test_short_where_no_longer_sequence_is_served(self):
        config = self.config()
        reference, ids = reference_model(config), token_ids(60, 128)
        model = build(config, reference.state_dict().items(), max_length=TRAINED)
        _close(Paged(model).feed(ids), _wanted(reference, ids))

    @pytest.mark.parametrize("name", ["su", "yarn"])
    def test_older_names(self, name):
        raw = self.config().to_dict()
        new = describe(raw)
        block = {**LONG, "type": name}
        del block["rope_type"]
        old = {k: v for k, v in raw.items() if k != "rope_parameters"} | {"rope_scaling": block, "rope_theta": 10000.0}
        assert describe(old) == new
        config = self.config()
        weights = list(reference_model(config).state_dict().items())
        ids = token_ids(90, 128)
        _close(Paged(build(old, weights)).feed(ids), Paged(build(config, weights)).feed(ids))


OLD = {**LLAMA3, "type": "llama3"}
del OLD["rope_type"]
SPELLINGS = {
    "rope_type": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "type": {"rope_scaling": OLD, "rope_theta": 500.0},
    "both equal": {"rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_theta": 500.0},
    "new block": {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "new block, theta outside": {"rope_parameters": LLAMA3, "rope_theta": 500.0},
}
PLAIN = {
    "null": {"rope_scaling": None, "rope_theta": 500.0},
    "absent": {"rope_theta": 500.0},
    "default": {"rope_scaling": {"rope_type": "default"}, "rope_theta": 500.0},
    "new default": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


def _raw(fields):
    return {**BASE, "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **fields}


@pytest.mark.parametrize(("spelling", "scaling"), [(s, LLAMA3) for s in SPELLINGS] + [(s, None) for s in PLAIN])
def test_raw_spellings_match_the_reference_at_position_200(spelling, scaling):
    config = _llama(scaling, rope_theta=500.0)
    reference, ids = reference_model(config), token_ids(201, 128)
    raw = _raw({**SPELLINGS, **PLAIN}[spelling])
    before = copy.deepcopy(raw)
    got = Paged(build(raw, reference.state_dict().items())).feed(ids)
    _close(got[200], _wanted(reference, ids)[200])
    assert raw == before, "the caller's config is not changed"


@pytest.mark.parametrize(
    ("block", "names"),
    [
        ({"rope_type": "llama3", "type": "linear", "factor": 2.0}, ["llama3", "linear", "rope_scaling"]),
        ({"rope_type": "spiral", "factor": 2.0}, ["spiral", "yarn"]),
        ({"type": "spiral"}, ["spiral"]),
        ({"factor": 2.0}, ["rope_type"]),
        ({"rope_type": "linear"}, ["rope_scaling.factor"]),
        ({"rope_type": "dynamic", "factor": 0}, ["rope_scaling.factor"]),
        ({"rope_type": "yarn", "factor": "4"}, ["rope_scaling.factor"]),
        ({"rope_type": "llama3", "factor": 8.0}, ["low_freq_factor"]),
        ({**LLAMA3, "high_freq_factor": 1.0}, ["high_freq_factor"]),
        ({**LONG, "long_factor": [1.0]}, ["long_factor", "8"]),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, ["long_factor"]),
        ("linear", ["rope_scaling"]),
        ([1], ["rope_scaling"]),
    ],
)
def test_wrong_blocks_name_the_field(block, names):
    with pytest.raises(ModelError) as caught:
        describe(_raw({"rope_scaling": block}))
    for name in [*names, "config.json"]:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({**YARN, "factor": 2.0}, 128),
        (LLAMA3, 64),
        ({**LONG, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_every_position_of_the_context_has_a_row(scaling, limit):
    raw = _raw({"rope_scaling": scaling, "max_position_embeddings": 64})
    assert describe(raw).max_position == limit
    reference = reference_model(transformers.LlamaConfig(**{**BASE, "num_hidden_layers": 2}))
    paged = Paged(build(raw, reference.state_dict().items()))
    paged.feed(token_ids(limit - 1, 128))
    assert paged.feed([5]).isfinite().all()


def test_one_rope_is_shared_and_never_changed():
    config = transformers.GlmConfig(**{**BASE, "num_hidden_layers": 4, "head_dim": 16})
    model = create(config, cpu_ops(), torch.float32)
    (table,) = model._tables
    cos, _ = table.at(torch.arange(3))
    assert cos.shape == (3, 4), "half of head_dim 16 in pairs, at every depth"
    assert len({id(layer._attention._spec.rope) for layer in model._layers}) == 1
