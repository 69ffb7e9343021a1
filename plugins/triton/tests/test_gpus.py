"""What the plugins of both vendors share without a kernel: device hooks on torch.cuda, the bus, recording of graphs."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from qiao.registry.manager import load_object
from qiao_triton import gpu, pci

from tests.support.gpus import card

SHARED = ("capture", "collective_backend", "memory_info", "synchronize")


@pytest.mark.parametrize("name", ["cuda", "dcu"])
def test_hooks_are_the_contracts(name) -> None:
    plugin = import_module(f"qiao_{name}")
    assert set(load_object(plugin, name).hooks) == set(plugin.__all__)
    assert all(getattr(plugin, hook) is getattr(gpu, hook) for hook in SHARED)


def test_freed_memory_that_torch_keeps_counts_as_free(monkeypatch) -> None:
    answers = {"mem_get_info": (10, 100), "memory_reserved": 40, "memory_allocated": 25}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer if device == "cuda:1" else None)
    memory = gpu.memory_info("cuda:1")
    assert (memory.free, memory.total) == (25, 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    assert gpu.memory_info("cuda:1").free == 100, "never more than there is"


def test_a_bus_with_a_device_that_shows_nothing(tmp_path) -> None:
    (tmp_path / "bus" / "pci" / "devices" / "0000:00:01.0").mkdir(parents=True)
    card(tmp_path, "0x1d94")
    (found,) = pci.accelerators(pci.HYGON, tmp_path)
    assert (found.address, found.device, found.driver) == ("0000:33:00.0", 0x54B7, "")


class Torch:
    """``torch.cuda``'s streams and graphs, noting the order of what happens; ``refuses`` is raised in a recording."""

    def __init__(self, refuses: Exception | None = None) -> None:
        self.said: list[str] = []
        self.refuses, self.pools = refuses, 0

    def pool(self) -> str:
        self.pools += 1
        return f"pool{self.pools}"

    def within(self, *words: str):
        said, refuses = self.said, self.refuses

        class Within:
            def __enter__(self) -> None:
                said.append(" ".join(words))

            def __exit__(self, kind, error, trace) -> None:
                said.append(f"end {words[0]}")
                if words[0] == "record" and refuses is not None and kind is None:
                    raise refuses

        return Within()

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.said.append(f"{name} waits {other.name}"))

    def put(self, monkeypatch) -> None:
        side, main = self.stream("side"), self.stream("main")
        for name, value in {
            "device": lambda device: self.within("on", device),
            "Stream": lambda: side,
            "current_stream": lambda: main,
            "stream": lambda stream: self.within("stream", stream.name),
            "synchronize": lambda: self.said.append("wait"),
            "graph_pool_handle": self.pool,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.said.append("replay")),
            "graph": lambda graph, pool, capture_error_mode: self.within("record", pool, capture_error_mode),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_recording_is_warmed_up_beside_and_waited_for(monkeypatch) -> None:
    fake, x = Torch(), torch.ones(3)
    fake.put(monkeypatch)
    outputs = []

    def function(x):
        fake.said.append("run")
        outputs.append((x + 1, x))
        return outputs[-1]

    replay = gpu.capture(function, (x,), "cuda:1")
    quiet = [word for word in fake.said if "on" not in word.split()]
    warm = ["side waits main", "stream side", "run", "run", "end stream", "main waits side", "wait"]
    assert quiet == [*warm, "record pool1 thread_local", "run", "end record"]
    assert fake.said[0] == fake.said[-1].replace("end on", "on cuda:1") == "on cuda:1"
    assert replay() is outputs[2] is replay() and fake.said[-2:] == ["replay", "replay"]
    gpu.capture(function, (x[:2],), "cuda:1")
    gpu.capture(function, (torch.ones(3),), "cuda:1")
    pools = [word.split()[1] for word in fake.said if word.startswith("record")]
    assert pools == ["pool1", "pool1", "pool2"], "graphs over the same buffers share a pool, others do not"


def test_what_a_recording_stream_refuses_has_a_reason(monkeypatch) -> None:
    Torch(RuntimeError("CUDA error: operation not permitted when stream is capturing\nhelp")).put(monkeypatch)
    with pytest.raises(NotImplementedError, match=r"a graph cannot record it: .* when stream is capturing$"):
        gpu.capture(lambda x: x, (torch.ones(2),), "cuda:0")
    Torch().put(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        gpu.capture(lambda x: 1 // 0, (torch.ones(2),), "cuda:0")
