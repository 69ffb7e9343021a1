"""Two models: figures beside transformers', and that damage as it happens in the field is caught."""

from __future__ import annotations

import gc
import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from qiao.cli.main import main
from qiao.config import EngineArgs
from qiao.errors import UsageError
from qiao.regress import Options, compare, make_report, parse_thresholds, read_suite
from qiao.regress import models as regress_models
from qiao.regress.store import LogitStore
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.quantization.test_checkpoints import awq_settings, gptq_settings
from tests.support.checkpoints import chain_checkpoint, edit_config, rand_checkpoint
from tests.support.quantized import BACKENDS
from tests.support.quantizers import awq, gptq, quantized_checkpoint

SUITE = read_suite(
    "\n".join(
        [
            '{"suite": "tiny", "thresholds": ["all: kl 0.001, changed 0"], "max_tokens": 6}',
            '{"id": "a", "prompt": "abcd", "reference": "ef 12"}',
            '{"id": "b", "messages": [{"role": "user", "content": "hello"}], "tags": ["chat"]}',
            '{"id": "c", "prompt": "a longer prompt of many bytes", "tags": ["long"], "reference": "end"}',
        ]
    ),
    "tiny",
)


def args(folder, **changes):
    return EngineArgs(model=str(folder), **{"device": "cpu", "num_gpu_blocks_override": 16, **changes})


def report_of(base, candidate, **options):
    found = compare(args(base), args(candidate), SUITE, Options(**options))
    return make_report(found, parse_thresholds(SUITE.header.thresholds))


def change(folder, target, changed):
    """A copy of a checkpoint with some tensors replaced by what ``changed`` makes of them."""
    shutil.copytree(folder, target)
    held = load_file(target / "model.safetensors")
    for name, tensor in held.items():
        held[name] = changed(name, tensor).contiguous()
    save_file(held, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def rand(tmp_path_factory):
    return rand_checkpoint(tmp_path_factory.mktemp("regress") / "m")


@pytest.fixture(scope="module")
def noisy(rand):
    noise = torch.Generator().manual_seed(1)
    return change(
        rand,
        rand.parent / "noisy",
        lambda n, t: t + 0.02 * torch.randn(t.shape, generator=noise) if t.dim() == 2 else t,
    )


def log_probabilities(folder, ids):
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0].double()
    return logits.log_softmax(-1).numpy()


def test_the_figures_are_those_of_transformers(rand, noisy):
    """Answer and reference of one case, its KL, log-probabilities and the place where the answers part."""
    result = compare(args(rand), args(noisy), SUITE).results[0]
    prompt = list(b"abcd")
    for along, ids in ((result.answer, result.base.token_ids), (result.reference, list(b"ef 12"))):
        p, q = (log_probabilities(folder, prompt + ids)[len(prompt) - 1 : -1] for folder in (rand, noisy))
        np.testing.assert_allclose(along.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(along.base_logprob, p[np.arange(len(ids)), ids], atol=1e-4)
        np.testing.assert_allclose(along.logprob, q[np.arange(len(ids)), ids], atol=1e-4)
        np.testing.assert_array_equal(along.same_top, p.argmax(-1) == q.argmax(-1))
    assert along.kl.mean() > 1e-3


def test_where_the_answers_part(rand, noisy):
    parted = [r for r in compare(args(rand), args(noisy), SUITE).results if r.split is not None]
    assert parted, "the noise changes an answer"
    for result in parted:
        at = result.split.position
        assert result.base.token_ids[:at] == result.candidate.token_ids[:at]
        mine, other = result.base.token_ids[at], result.candidate.token_ids[at]
        assert mine != other
        assert result.split.margin >= 0 and result.split.candidate_margin >= 0
        assert result.answer.base_logprob[at] == pytest.approx(np.log(max(a.base for a in result.split.alternatives)))
        assert len(result.split.alternatives) >= 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_equal_to_itself(dtype, rand):
    found = compare(args(rand, dtype=dtype), args(rand, dtype=dtype), SUITE)
    for result in found.results:
        assert not result.distributions.kl.any() and result.distributions.same_top.all()
        assert result.split is None and result.base == result.candidate
    assert make_report(found, parse_thresholds(["all: kl 0, kl_max 0, top1 1, changed 0"]))["passes"]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "cpu"] + ["cpu"])
def test_a_plugin_computes_the_same_model(name, rand):
    """The gate for a plugin: beside the reference plugin on another device name."""
    found = compare(args(rand, device="reference"), args(rand, device=name), SUITE)
    report = make_report(found, parse_thresholds(["all: kl 1e-6, top1 1, changed 0"]))
    assert report["passes"], report["verdicts"]


class TestDamage:
    """What the acceptance asks for: each is caught, and the undamaged checkpoint passes against itself."""

    def caught(self, good, bad):
        assert report_of(good, good)["passes"]
        report = report_of(good, bad)
        assert not report["passes"]
        return report["tags"]["all"]["kl"]["value"]

    def test_a_zero_point_off_by_one(self, tmp_path):
        """Asymmetric zeros of GPTQ's first format read as those of the second."""
        good, _ = quantized_checkpoint(tmp_path / "good", gptq(), gptq_settings())
        shutil.copytree(good, tmp_path / "bad")
        edit_config(tmp_path / "bad", quantization_config=gptq_settings(checkpoint_format="gptq_v2"))
        assert self.caught(good, tmp_path / "bad") > 0.01

    def test_a_single_layers_zero_points_off_by_one(self, tmp_path):
        good, _ = quantized_checkpoint(tmp_path / "good", gptq(zeros=lambda z: z.clip(1, 14)), gptq_settings())

        def lowered(name, tensor):
            return tensor - 0x11111111 if name == "model.layers.1.mlp.down_proj.qzeros" else tensor

        assert self.caught(good, change(good, tmp_path / "bad", lowered)) > 1e-3

    def test_a_swapped_order_of_awq(self, tmp_path):
        """Slots of a word in plain order instead of gemm's."""
        good, _ = quantized_checkpoint(tmp_path / "good", awq(), awq_settings())

        def swapped(name, tensor):
            if not name.endswith("qweight"):
                return tensor
            words = tensor.numpy().view(np.uint32)
            slots = [(words >> np.uint32(4 * slot)) & np.uint32(15) for slot in range(8)]
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            moved = sum(slots[order[slot]].astype(np.uint64) << np.uint64(4 * slot) for slot in range(8))
            return torch.from_numpy(moved.astype(np.uint32).view(np.int32))

        assert self.caught(good, change(good, tmp_path / "bad", swapped)) > 0.01

    def test_a_dropped_bias(self, tmp_path):
        plain = rand_checkpoint(tmp_path / "plain", attention_bias=True)
        noise = torch.Generator().manual_seed(2)

        def biased(name, tensor):
            return torch.randn(tensor.shape, generator=noise) if name.endswith("q_proj.bias") else tensor

        good = change(plain, tmp_path / "good", biased)

        def dropped(name, tensor):
            return torch.zeros_like(tensor) if name == "model.layers.0.self_attn.q_proj.bias" else tensor

        assert self.caught(good, change(good, tmp_path / "bad", dropped)) > 1e-3


def test_pieces_are_the_text(tmp_path):
    """One character of three byte tokens is shown once, at its last token."""
    chain = chain_checkpoint(tmp_path / "m", "x>a\u4e2db")
    suite = read_suite('{"id": "a", "prompt": "x"}', "s")
    answer = compare(args(chain), args(chain), suite).results[0].base
    assert answer.text == "a\u4e2db" and answer.pieces == ["a", "", "", "\u4e2d", "b", "</s>"]


def test_only_one_model_is_in_memory(rand, monkeypatch):
    alive: list[weakref.ref] = []
    start = regress_models.LLM.from_engine_args

    def started(wanted):
        gc.collect()
        assert not [one for one in alive if one() is not None], "the base is still there"
        made = start(wanted)
        alive.append(weakref.ref(made._engine))
        return made

    monkeypatch.setattr(regress_models.LLM, "from_engine_args", started)
    compare(args(rand), args(rand), SUITE)
    assert len(alive) == 2


class TestVocabularies:
    def test_others_are_refused(self, rand, tmp_path):
        other = rand_checkpoint(tmp_path / "other", tokenizer={"extra_tokens": {300: "word"}})
        with pytest.raises(UsageError, match=r"token 300.*--text-only"):
            compare(args(rand), args(other), SUITE)

    def test_texts_alone(self, tmp_path):
        """Another vocabulary with the same texts: nothing changed; another text: changed."""
        base = chain_checkpoint(tmp_path / "base", "x>DEF")
        same = chain_checkpoint(tmp_path / "same", "x>DEF", tokenizer={"extra_tokens": {300: "word"}})
        other = chain_checkpoint(tmp_path / "other", "x>DEG")
        suite = read_suite('{"id": "a", "prompt": "x", "check": {"exact": "DEF"}}', "s")
        thresholds = parse_thresholds(["all: changed 0, lost 0"])
        for candidate, passes in ((same, True), (other, False)):
            found = compare(args(base), args(candidate), suite, Options(text_only=True))
            report = make_report(found, thresholds)
            assert report["passes"] == passes and report["tags"]["all"]["kl"] is None
            assert found.results[0].base.text == "DEF"

    def test_unused_ids_at_the_end_are_cut(self, rand, tmp_path):
        """A table that was only filled up: the ids that both have are compared."""
        longer = tmp_path / "longer"

        def filled(name, tensor):
            wide = name in ("model.embed_tokens.weight", "lm_head.weight")
            return torch.cat([tensor, torch.zeros(64, 64)]) if wide else tensor

        change(rand, longer, filled)
        edit_config(longer, vocab_size=384)
        found = compare(args(rand), args(longer), SUITE)
        assert found.notes == [("vocabulary_cut", {"base": "320", "candidate": "384"})]
        assert all(result.distributions.kl.max() < 1e-9 for result in found.results)


def test_another_chat_template_is_noted(rand, tmp_path):
    other = rand_checkpoint(tmp_path / "other", tokenizer={"chat_template": "{{ messages[0].content }}!"})
    found = compare(args(rand), args(other), SUITE)
    assert found.notes == [("prompts_differ", {"count": "1"})]
    assert not any(result.distributions.kl.any() for result in found.results)


def test_a_base_without_a_chat_template(rand, tmp_path):
    plain = rand_checkpoint(tmp_path / "plain", tokenizer={"chat_template": None})
    found = compare(args(plain), args(plain), SUITE)
    assert ("no_chat_template", {}) in found.notes and len(found.results) == 3


def test_what_goes_wrong_names_model_and_case(rand, tmp_path):
    long = read_suite('{"id": "far", "prompt": "' + "x" * 600 + '"}', "s")
    with pytest.raises(UsageError, match=rf"base {rand}.*600 tokens"):
        compare(args(rand), args(rand), long)
    with pytest.raises(UsageError, match=r"candidate .*missing"):
        compare(args(rand), args(tmp_path / "missing"), SUITE)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path):
    store = LogitStore(tmp_path, 1 << 20)
    with pytest.raises(UsageError, match="--scratch"):
        store.reserve(1 << 40)
    assert not list(tmp_path.iterdir())


def test_the_store_gives_back_what_was_put(tmp_path):
    store, rows = LogitStore(tmp_path, 7), torch.randn(5, 7)
    store.append(rows[:2])
    store.append(rows[2:])
    assert len(store) == 5
    assert torch.equal(store.read(1, 3), rows[1:4])


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    file = tmp_path_factory.mktemp("suite") / "mine.jsonl"
    file.write_text('{"suite": "mine", "thresholds": ["all: lost 0"], "max_tokens": 5}\n')
    with file.open("a") as stream:
        stream.write('{"id": "a", "prompt": "x", "tags": ["t"], "check": {"contains": "DEF"}}\n')
    return file


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chains")
    return [chain_checkpoint(folder / name, text) for name, text in (("base", "x>DEF"), ("bad", "x>DXF"))]


class TestCommand:
    def run(self, *argv):
        with pytest.raises(SystemExit) as stop:
            main(["regress", *map(str, argv)])
        return stop.value.code

    def test_passes_breaks_and_cannot_run(self, chains, suite, tmp_path, capfd):
        base, bad = (f"{chain},device=cpu,num-gpu-blocks-override=16" for chain in chains)
        files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--lang", "en")
        assert self.run(base, base, "--suite", suite, "--threshold", "t: kl_max 0", *files) == 0
        assert "PASSES" in capfd.readouterr().out
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["passes"] and [v["threshold"] for v in report["verdicts"]] == ["all: lost 0", "t: kl_max 0"]
        assert report["base"]["settings"]["num_gpu_blocks_override"] == "16"
        assert "PASSES" in (tmp_path / "r.html").read_text()
        assert self.run(base, bad, "--suite", suite, *files) == 1
        assert "all: lost 0: 1, broken" in capfd.readouterr().out
        assert not json.loads((tmp_path / "r.json").read_text())["passes"]
        assert self.run(base, tmp_path / "none", "--suite", suite) == 2
        assert "none" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--threshold", "x: kl 1"], "no case has the tag 'x'"),
            (["--lang", "fr"], "--lang"),
            (["--json", "/no/such/folder/r.json"], "/no/such/folder"),
            (["--scratch", "/no/such/folder"], "--scratch"),
            (["--suite", "none.jsonl"], "none.jsonl"),
        ],
    )
    def test_mistakes_are_found_before_a_model_is_loaded(self, words, message, suite, capfd):
        assert self.run("no-base", "no-candidate", "--suite", suite, *words) == 2
        assert message in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("m,devise=cpu", "devise"),
            ("m,port=80", "port"),
            ("m,model=x", "model"),
            ("m,dtype=int3", "dtype"),
            ("m,max-model-len=x", "max-model-len"),
        ],
    )
    def test_wrong_settings_are_named(self, text, message, suite, capfd):
        assert self.run(text, "m", "--suite", suite) == 2
        assert message in capfd.readouterr().err

    def test_a_bug_does_not_read_as_a_broken_threshold(self, suite, monkeypatch, capfd):
        monkeypatch.setattr("qiao.regress.compare", lambda *a: 1 / 0)
        assert self.run("a", "b", "--suite", suite) == 2
        assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_spec_is_the_servers_flags():
    from qiao.cli.regress import spec

    found = spec("/a,b/m.gguf,plugin=sim,kv-cache-dtype=int8,drop=attention,sample,hf-overrides.x=1,max_model_len=2k")
    assert (found.model, found.device, found.kv_cache_dtype) == ("/a,b/m.gguf", "sim", "int8")
    assert (found.drop, found.hf_overrides, found.max_model_len) == (("attention", "sample"), {"x": 1}, 2000)


def test_logits_that_are_not_finite_end_the_run(rand, tmp_path):
    def broken(name, tensor):
        return torch.full_like(tensor, 3e38) if name == "model.norm.weight" else tensor

    bad = change(rand, tmp_path / "bad", broken)
    from qiao.errors import KernelError

    with pytest.raises(KernelError, match=r"candidate.*(NaN|infinity)"):
        compare(args(rand), args(bad), SUITE)
