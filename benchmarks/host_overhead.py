"""What the engine costs on the host for each decode step, on a model and a device that compute nothing.

Prints one line per batch size with the milliseconds of each phase, and marks sizes over the budget (1 ms at 32
sequences, 4 ms at 256). The model's own call is left out of the total; its operators return constants. All on one
thread, in its CPU time, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from qiao.contract import AttentionMetadata, AttentionShape, KVCache, LogprobOutput, MemoryInfo, ModelShape, composites
from qiao.engine import Engine, EngineConfig
from qiao.engine.request import EngineRequest
from qiao.frontend import OutputProcessor, TokenTable
from qiao.optable import OpTable
from qiao.sampling_params import SamplingParams
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 32000
BLOCK_SIZE = 16
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BUDGET_MS = {32: 1.0, 256: 4.0}
PHASES = ("schedule", "batch", "sample", "outputs", "other", "detokenise")
TOKEN = 66


class NullModel:
    """Gives rows of zeros, without computing them."""

    shape = ModelShape("Null", 1, VOCAB, "float32", 1 << 16, (AttentionShape(1, 1, 1, 1),), ())

    def __init__(self, size: int) -> None:
        self._hidden = torch.zeros(size, 1)
        self._logits = torch.zeros(1, VOCAB).expand(size, VOCAB)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to load."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Rows of zeros [T, 1]."""
        return self._hidden[: len(token_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of zeros [N, V] that share memory."""
        return self._logits[: len(hidden)]


def null_ops(size: int) -> OpTable:
    """Operators that return constants at once."""
    ids = torch.full((size,), TOKEN, dtype=torch.int64)
    zeros = torch.zeros(size, dtype=torch.float32)
    ranks = torch.ones(size, dtype=torch.int64)

    def allocate(count: int, block: int, heads: int, dim: int, dtype: torch.dtype, layout: str, device: str) -> KVCache:
        empty = torch.empty(0, dtype=dtype)
        return KVCache(empty, empty, block, layout)

    def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> LogprobOutput:
        rows = len(token_ids)
        return LogprobOutput(
            zeros[:rows], ranks[:rows], ids[:rows, None].expand(rows, top), zeros[:rows, None].expand(rows, top)
        )

    return OpTable(
        device="cpu",
        kv_device="cpu",
        sample_device="cpu",
        kv_layout="NHD",
        memory_info=lambda device: MemoryInfo(1 << 40, 1 << 40),
        synchronize=lambda device: None,
        allocate_kv=allocate,
        copy_blocks=lambda cache, source, target: None,
        write_kv=lambda key, value, cache, slots: None,
        attention=lambda query, *rest: query,
        stage_logits=lambda logits: logits,
        sample=lambda logits, params: ids[: len(logits)],
        apply_penalties=lambda logits, params: logits,
        logprobs=logprobs,
        matmul={},
        rms_norm=composites.rms_norm,
        add_rms_norm=composites.add_rms_norm,
        rotary=composites.rotary,
        silu_mul=composites.silu_mul,
        gelu_mul=composites.gelu_mul,
        cap_logits=composites.cap_logits,
        route_experts=composites.route_experts,
        combine_experts=composites.combine_experts,
    )


class Clock:
    """CPU seconds of this thread in wrapped functions, without what inner wrapped ones took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time added to ``name``."""

        def timed(*args: Any, **options: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                taken = time.thread_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner
                self._inner = outer + taken

        return timed


def byte_table() -> TokenTable:
    """A byte-level tokenizer without merges: as many pushes as tokens, as in any run."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return TokenTable(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def make_engine(size: int, prompt: int, steps: int, clock: Clock) -> Engine:
    """An engine of ``size`` rows whose phases report to ``clock``."""
    context = prompt + steps + 2
    model, ops = NullModel(max(size, size * prompt)), null_ops(size)
    config = EngineConfig(
        num_blocks=size * (-(-context // BLOCK_SIZE) + 1),
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB,
        max_model_len=context,
        max_num_seqs=size,
        max_num_batched_tokens=max(2048, size * prompt),
        max_num_queued=size,
    )
    model.forward = clock.wrap("model", model.forward)  # type: ignore[method-assign]
    model.logits = clock.wrap("model", model.logits)  # type: ignore[method-assign]
    engine: Any = Engine(model, ops, config)
    engine._scheduler.schedule = clock.wrap("schedule", engine._scheduler.schedule)
    engine._runner.build = clock.wrap("batch", engine._runner.build)
    engine._runner.run = clock.wrap("batch", engine._runner.run)
    engine._runner.sampler.sample = clock.wrap("sample", engine._runner.sampler.sample)
    engine._collect = clock.wrap("outputs", engine._collect)
    engine._advance = clock.wrap("outputs", engine._advance)
    return engine  # type: ignore[no-any-return]


def measure(size: int, steps: int, table: TokenTable, params: dict[str, Any], prompt: int = 32) -> dict[str, float]:
    """Median milliseconds of each phase of a decode step with ``size`` sequences."""
    clock = Clock()
    engine = make_engine(size, prompt, steps, clock)
    processors: dict[str, OutputProcessor] = {}
    for i in range(size):
        settings = SamplingParams(max_tokens=steps + 2, ignore_eos=True, **params)
        request = EngineRequest(
            request_id=str(i), prompt_token_ids=[i % 256] * prompt, params=settings, arrival=time.time()
        )
        processors[str(i)] = OutputProcessor(request, None, table)
        engine.add_request(request)
    engine.step()
    step = clock.wrap("other", engine.step)
    seen: list[dict[str, float]] = []
    for _ in range(steps):
        clock.seconds.clear()
        outputs = step()
        start = time.thread_time()
        for output in outputs:
            processors[output.request_id].add(output)
        clock.seconds["detokenise"] = time.thread_time() - start
        assert len(outputs) == size, "every sequence decodes in every step"
        seen.append(dict(clock.seconds))
    result = {name: 1e3 * statistics.median(s.get(name, 0.0) for s in seen) for name in PHASES}
    result["total"] = 1e3 * statistics.median(sum(s.get(name, 0.0) for name in PHASES) for s in seen)
    return result


def verdict(size: int, total: float) -> str:
    """Against the budget, where there is one for this size."""
    if size not in BUDGET_MS:
        return ""
    return f"{'within' if total < BUDGET_MS[size] else 'OVER'} {BUDGET_MS[size]:g} ms"


def report(title: str, sizes: Iterable[int], steps: int, table: TokenTable, params: dict[str, Any]) -> list[Any]:
    """Measure and print one curve."""
    print(f"\n{title}: median ms a step")
    print(f"{'seqs':>6}" + "".join(f"{name:>12}" for name in (*PHASES, "total")) + f"{'us/seq':>9}")
    rows = []
    for size in sizes:
        found = measure(size, steps, table, params)
        columns = "".join(f"{found[name]:12.3f}" for name in (*PHASES, "total"))
        print(f"{size:6}{columns}{1e3 * found['total'] / size:9.1f}  {verdict(size, found['total'])}")
        rows.append({"sequences": size, **found})
    return rows


def plot(path: Path, curves: dict[str, list[Any]]) -> None:
    """Totals over the number of sequences, with the budgets; needs matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, rows in curves.items():
        axes.plot([r["sequences"] for r in rows], [r["total"] for r in rows], marker="o", label=name)
    for size, limit in BUDGET_MS.items():
        axes.plot([1, size], [limit, limit], linestyle="--", color="gray")
        axes.annotate(f"budget at {size}: {limit:g} ms", (1, limit), textcoords="offset points", xytext=(2, 3))
    axes.set(xscale="log", yscale="log", xlabel="running sequences", ylabel="host ms a step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the curve from 1 to 1,024 sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured for each size")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to write a picture (needs matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = byte_table()
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "random": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    }
    curves = {name: report(name, options.sizes, options.steps, table, params) for name, params in kinds.items()}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"python": platform.python_version(), "machine": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps({"steps": options.steps, **facts, "milliseconds": curves}, indent=1))
    if options.plot:
        plot(options.plot, curves)


if __name__ == "__main__":
    main()
