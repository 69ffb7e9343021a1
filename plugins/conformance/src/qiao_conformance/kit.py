"""The conformance kit: one test per case of the contract, on the plugin named by ``--qiao-device``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qiao.contract import CATALOG, WeightInfo
from qiao.contract.cases import Case, cases

from qiao_conformance import behaviour, captured, drawn, reality
from qiao_conformance.checks import check_case
from qiao_conformance.target import Target, find, host, same

_TARGET = pytest.StashKey[Target]()

EXAMPLES = 25
"""Drawn cases for each hook unless ``--qiao-examples`` says otherwise."""


def target_of(config: pytest.Config) -> Target:
    """The plugin under test, looked up once a session."""
    if _TARGET not in config.stash:
        try:
            config.stash[_TARGET] = find(config.getoption("--qiao-device"))
        except LookupError as error:
            raise pytest.UsageError(f"--qiao-device: {error}") from error
    return config.stash[_TARGET]


def few(target: Target, hook: str) -> Iterator[tuple[Case, Case]]:
    """For each dtype the second case of ``hook`` with the third, or what there is."""
    for dtype in target.capabilities.dtypes if CATALOG[hook].family != "sampling" else ("float32",):
        mine = [case for case in cases(hook, target.capabilities) if case.dtype == dtype]
        if mine:
            yield (mine[1:] or mine)[0], (mine[2:] or mine)[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each hook that the plugin has, each case that its capabilities call for."""
    target, wanted = target_of(metafunc.config), metafunc.fixturenames
    hooks = [hook for hook in CATALOG if hook in target.hooks]
    if "pair" in wanted:
        pairs = [pair for hook in hooks for pair in few(target, hook) if hook != "allocate_kv"]
        metafunc.parametrize("pair", pairs, ids=[case.id for case, _ in pairs])
    elif "case" in wanted:
        found = [c for hook in hooks for c in cases(hook, target.capabilities)]
        metafunc.parametrize("case", found, ids=[c.id for c in found])
    elif "dtype" in wanted:
        metafunc.parametrize("dtype", target.capabilities.dtypes if "capture" in target.hooks else ())
    elif "drawn_hook" in wanted:
        metafunc.parametrize("drawn_hook", [h for h in hooks if drawn.recipes(h, target.capabilities) is not None])
    elif "hook" in wanted:
        metafunc.parametrize("hook", hooks)


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The plugin under test."""
    return target_of(request.config)


def test_names_and_types(target: Target, hook: str) -> None:
    """The binder calls by position."""
    behaviour.check_names_and_types(target, hook)


def test_required_device_hooks(target: Target) -> None:
    """Without these four nothing can start."""
    behaviour.check_device_hooks(target)


def test_threads(target: Target) -> None:
    """A plugin that has the hook says what it uses by default, and refuses a number that is none."""
    if "set_threads" not in target.hooks:
        pytest.skip("the plugin has no set_threads")
    behaviour.check_threads(target)


def test_replays_follow_their_buffers(target: Target, dtype: str) -> None:
    """A captured layer equals the layer: other tokens, positions, lengths, blocks and slots, empty rows."""
    captured.check_replays(target, dtype)


def test_capture_refuses_what_it_cannot_follow(target: Target) -> None:
    """A value on the host is refused or followed, never kept; errors come out as they are."""
    if "capture" not in target.hooks:
        pytest.skip("the plugin has no capture")
    captured.check_host_value(target)
    captured.check_errors(target)


def test_packed_weights_come_back(target: Target) -> None:
    """Copies of the tensors of a packed weight multiply as the weight itself, to the bit."""
    hook, packing = target.hooks.get("restore_weight"), target.capabilities.packing
    assert hook is not None or not packing, "Capabilities.packing needs the hook restore_weight"
    if hook is None:
        pytest.skip("the plugin has no restore_weight")
    device, draw = target.device.torch_device, torch.Generator().manual_seed(0)
    info = WeightInfo("layer", 64, 48)
    values = torch.randn(48, 64, generator=draw).to(getattr(torch, target.capabilities.dtypes[0])).to(device)
    x = torch.randn(3, 64, generator=draw).to(values)
    packed = target.hooks["pack_weight"]("dense", {"weight": values}, info, device)
    again = hook("dense", {name: tensor.clone() for name, tensor in packed.data.items()}, info, device)
    assert (again.scheme, again.info) == (packed.scheme, packed.info)
    assert same(host(target.hooks["matmul"](x, packed, None)), host(target.hooks["matmul"](x, again, None)))
    with pytest.raises(ValueError, match=r"."):
        hook("dense", {"weight": torch.zeros(1)}, info, device)


def test_case(target: Target, case: Case) -> None:
    """The result within tolerance, and nothing changed but what the catalog allows."""
    check_case(target, case)


def test_strided(target: Target, pair: tuple[Case, Case]) -> None:
    """The same with activations that are parts of wider rows."""
    check_case(target, pair[0], strided=True)


def test_repeatable(target: Target, pair: tuple[Case, Case]) -> None:
    """Equal bits the second time, and nothing kept from one call to the next."""
    behaviour.check_repeatable(target, *pair)


def check_drawn(target: Target, hook: str, examples: int = EXAMPLES) -> None:
    """Draw ``examples`` cases of ``hook``; raises ``AssertionError`` with the smallest that fails in its notes."""
    strategy = drawn.recipes(hook, target.capabilities)
    assert strategy is not None, f"{hook} has no drawn cases"

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(recipe=strategy, strided=st.booleans())
    def check(recipe: drawn.Recipe, strided: bool) -> None:
        check_case(target, drawn.build(hook, recipe), strided=strided)

    check()


def test_drawn(target: Target, drawn_hook: str, request: pytest.FixtureRequest) -> None:
    """Cases drawn within what the chip declares; a failure is shrunk to the smallest that shows it."""
    check_drawn(target, drawn_hook, request.config.getoption("--qiao-examples"))


def test_out_of_memory(target: Target) -> None:
    """A cache that cannot fit raises ``torch.OutOfMemoryError``, and the device works as before."""
    if "allocate_kv" not in target.hooks:
        pytest.skip("the plugin has no allocate_kv")
    behaviour.check_out_of_memory(target)


def test_plan_and_reality_agree(target: Target) -> None:
    """A small model runs by Qiao's engine: what the plan puts on the plugin is called there and nowhere else."""
    reality.check_plan(target)
