"""Seven faults that plugins have had, each planted in a copy of the reference plugin's source, are caught."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import qiao_reference
from qiao.contract.cases import cases
from qiao.registry import backend_of
from qiao_conformance import kit
from qiao_conformance.target import Target

FAULTS = {
    "wrong scale": (
        "attention.py",
        "_decode(query, cache, group, scale, sliding_window",
        "_decode(query, cache, group, 1.0, sliding_window",
        {"attention", "decode_attention"},
    ),
    "transposed KV": (
        "attention.py",
        "slot_mapping % cache.block_size] = rows.to(part.dtype)",
        "slot_mapping % cache.block_size] = "
        "(rows.transpose(1, 2).reshape(rows.shape) if rows.dim() > 2 else rows).to(part.dtype)",
        {"write_kv", "rope_write_kv", "attention", "decode_attention", "copy_blocks"},
    ),
    "off-by-one zero point": (
        "matmul.py",
        'value -= _spread(data["zero"][first:last], info)',
        'value -= _spread(data["zero"][first:last], info) + 1',
        {"matmul"},
    ),
    "groups spread over all inputs": (
        "matmul.py",
        "size = info.group_size if info.group_size > 0 else -(-info.in_features // per_group.shape[1])",
        "size = -(-info.in_features // per_group.shape[1])",
        {"matmul", "expert_matmul"},
    ),
    "ignored sliding window": (
        "attention.py",
        "one, scale, sliding_window, soft_cap)",
        "one, scale, 0, soft_cap)",
        {"attention"},
    ),
    "write outside a slot": (
        "attention.py",
        "            part.view(-1, *part.shape[2:]).index_copy_(0, slot_mapping, rows.to(part.dtype))\n",
        "            flat = part.view(-1, *part.shape[2:])\n"
        "            flat.index_copy_(0, (slot_mapping + 1) % len(flat), rows.to(part.dtype))\n"
        "            flat.index_copy_(0, slot_mapping, rows.to(part.dtype))\n",
        {"write_kv", "rope_write_kv"},
    ),
    "top-p off by one": (
        "sampling.py",
        "keep &= (mass - weight < (top_p * total)[:, None])",
        "keep &= (mass < (top_p * total)[:, None])",
        {"sample"},
    ),
}


def copied(folder: Path, name: str, file: str = "", old: str = "", new: str = "") -> Target:
    """A copy of the reference plugin as the package ``name``, with ``old`` replaced by ``new`` in one file."""
    package = folder / name
    shutil.copytree(Path(qiao_reference.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        text = path.read_text().replace("qiao_reference", name).replace('"reference', f'"{name}')
        if path.name == file:
            assert old in text, f"{file} has changed: plant the fault anew"
            text = text.replace(old, new)
        path.write_text(text)
    backend = backend_of(importlib.import_module(name), name)
    return Target(name, backend.hooks, backend.device, backend.capabilities)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("faulty_")]:
        del sys.modules[name]


def caught(target: Target, hooks: set[str]) -> dict[str, str]:
    """Hook -> how it failed first, by fixed cases or by drawn ones."""
    found = {}
    for hook in sorted(hooks):
        try:
            for case in cases(hook, target.capabilities):
                kit.check_case(target, case)
            kit.check_drawn(target, hook, examples=10)
        except AssertionError as error:
            found[hook] = str(error)
    return found


def test_the_unharmed_copy_passes(folder: Path) -> None:
    target = copied(folder, "faulty_not")
    assert not caught(target, {"attention", "decode_attention", "write_kv", "matmul", "sample"})


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(folder: Path, fault: str) -> None:
    file, old, new, hooks = FAULTS[fault]
    target = copied(folder, f"faulty_{list(FAULTS).index(fault)}", file, old, new)
    found = caught(target, {*hooks, "rms_norm", "logprobs"})
    assert set(found) >= hooks - {"copy_blocks"} and set(found) <= hooks
    if fault == "write outside a slot":
        assert "written outside the slots" in found["write_kv"]


def test_a_failure_is_shrunk_to_the_smallest_case_that_shows_it(folder: Path) -> None:
    """A kernel that is wrong from a group of four heads on: the notes name a single sequence with four."""
    target = copied(folder, "faulty_group")
    right = target.hooks["attention"]

    def wrong(query, cache, *rest):
        out = right(query, cache, *rest)
        return out * 1.5 if query.shape[1] // cache.key.shape[2 if cache.layout == "NHD" else 1] >= 4 else out

    broken = Target("faulty", {**target.hooks, "attention": wrong}, target.device, target.capabilities)
    with pytest.raises(AssertionError) as failure:
        kit.check_drawn(broken, "attention", examples=40)
    text = "\n".join([str(failure.value), *getattr(failure.value, "__notes__", ())])
    assert "kv_heads=1, group=4, sequences=((1, 1),)" in text
