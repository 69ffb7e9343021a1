"""Run a tiny Llama through the real engine on a bound plan, counting what crosses the simulated bus in each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from qiao.contract import AttentionMetadata, KVCache, ModelShape, StepShape
from qiao.engine import Engine, EngineConfig
from qiao.engine.request import EngineRequest, FallbackCount, SequenceOutput
from qiao.models import create, describe
from qiao.models.base import Model
from qiao.optable import OpTable
from qiao.registry import Backend, FallbackCounters, Plan, Policy, backend_of, make_plan
from qiao.sampling_params import SamplingParams

from tests.support.checkpoints import rand_config

BLOCK = 4

PROMPTS = ([60 + i for i in range(19)], [5, 6, 7, 8, 9, 10, 11], [300, 2], [40 + i for i in range(13)], [17])
"""Ragged: with a budget of 16 tokens a step, the first step wants no logits and later ones mix prompts and decodes."""


@cache
def expected() -> dict[str, list[int]]:
    """The greedy tokens that transformers gives for ``PROMPTS``, each alone."""
    from transformers import AutoModelForCausalLM

    config, weights = checkpoint()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
        found[str(i)] = out[0, len(prompt) :].tolist()
    return found


@cache
def checkpoint() -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and weights of the RAND Llama in float32."""
    from transformers import AutoModelForCausalLM

    config = rand_config(architectures=["LlamaForCausalLM"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return config, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def shape() -> ModelShape:
    """What the plan sees of the checkpoint."""
    return describe(checkpoint()[0])


def host_backend() -> Backend:
    """The reference plugin on the CPU."""
    import qiao_reference

    return backend_of(qiao_reference, "reference")


def sim_backend(missing: Sequence[str] = (), devices: int = 1, chip: str = "full") -> Backend:
    """The simulated device, as a plugin that lacks the hooks ``missing``."""
    from qiao_conformance import sim
    from qiao_conformance.sim import plugin

    sim.setup(devices=devices, memory=256 << 20, chip=chip)
    return backend_of(plugin.without(*missing), "sim", host=host_backend())


class Spy:
    """A model that notes the shape of each step."""

    def __init__(self, model: Model) -> None:
        self._model, self.shape = model, model.shape
        self.step: StepShape | None = None

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load(weights)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        seqs, width = metadata.block_tables.shape
        self.step = StepShape(len(token_ids), seqs, 0, max(metadata.kv_lens), width)
        return self._model.forward(token_ids, positions, caches, metadata)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        step = self.step
        assert step is not None
        self.step = StepShape(step.tokens, step.seqs, len(hidden), step.context, step.table_width)
        return self._model.logits(hidden)


@dataclass
class Crossing:
    """One step: its shape, and copies and bytes that the simulated bus counted each way."""

    step: StepShape
    copies_to_host: int
    copies_to_device: int
    bytes_to_host: int
    bytes_to_device: int

    @classmethod
    def of(cls, step: StepShape, counted: Any) -> Crossing:
        return cls(step, counted["d2h"], counted["h2d"], counted.bytes["d2h"], counted.bytes["h2d"])

    @classmethod
    def priced(cls, plan: Plan, step: StepShape) -> Crossing:
        total = plan.price(step).total
        return cls(step, total.copies_to_host, total.copies_to_device, total.bytes_to_host, total.bytes_to_device)


@dataclass
class Served:
    """Tokens by request, errors by request, what crossed in each step, and the fallback counters afterwards."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)
    counters: FallbackCounters = field(default_factory=FallbackCounters)

    def take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error:
                self.errors[output.request_id] = output.error


def build(table: OpTable, counters: FallbackCounters) -> tuple[Engine, Spy]:
    """An engine with the checkpoint's weights over ``table``. Nothing is captured: a plan prices eager steps."""
    config, weights = checkpoint()
    model = Spy(create(config, table, torch.float32))
    model.load(weights.items())
    sizes = EngineConfig(
        num_blocks=32,
        block_size=BLOCK,
        vocab_size=config.vocab_size,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_num_queued=16,
        enable_prefix_caching=False,
        enforce_eager=True,
    )

    def counts() -> list[FallbackCount]:
        return [
            FallbackCount(r.operator, r.calls, r.bytes_to_host, r.bytes_to_device, r.seconds)
            for r in counters.snapshot()
        ]

    return Engine(model, table, sizes, counts), model


def request(name: str, prompt: Sequence[int], **params: Any) -> EngineRequest:
    """A greedy request of 6 tokens unless ``params`` say otherwise."""
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **params})
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), params=settings, arrival=0.0)


def serve(table: OpTable, counters: FallbackCounters | None = None) -> Served:
    """Serve ``PROMPTS``, the last one arriving while the others decode; on a simulated device count each step."""
    from qiao_conformance import sim

    served = Served(counters=counters or FallbackCounters())
    engine, model = build(table, served.counters)
    for i, prompt in enumerate(PROMPTS[:-1]):
        engine.add_request(request(str(i), prompt))
    late, steps = request(str(len(PROMPTS) - 1), PROMPTS[-1]), 0
    while engine.has_work():
        with sim.counted() as counted:
            served.take(engine.step())
        assert model.step is not None
        served.crossings.append(Crossing.of(model.step, counted))
        steps += 1
        if steps == 3:
            engine.add_request(late)
    return served


def plan_for(backend: Backend, policy: str = "allow", **options: Any) -> Plan:
    """The plan of the checkpoint on ``backend``."""
    return make_plan(shape(), backend, Policy.parse(policy), block_size=BLOCK, **options)
