"""What a user sets about quantizing, checked, and what of it is written into ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qiao.errors import ParameterError

METHODS = ("gptq", "awq", "rtn")
ACT_ORDERS = ("static", "group", "none")
_BITS: Mapping[str, tuple[int, ...]] = {"gptq": (2, 3, 4, 8), "rtn": (2, 3, 4, 8), "awq": (4,)}
_GROUPS = (-1, 32, 64, 128)
_SEEDS = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Options:
    """All that decides the result, besides the model and the calibration data.

    ``symmetric`` None is the usual one of the method: true for gptq and rtn, false for awq. ``act_order`` is gptq's:
    ``static`` rounds the columns with the largest activations first and leaves groups where they are, ``group`` also
    puts such columns into common groups (``desc_act``; loaders must permute), ``none`` goes from left to right.
    ``damp`` is the share of the Hessian's mean diagonal that is added to it. ``samples`` and ``length`` (tokens) bound
    the calibration data.

    Raises ``ParameterError`` naming the flag.
    """

    method: str = "gptq"
    bits: int = 4
    group: int = 128
    symmetric: bool | None = None
    act_order: str = "static"
    damp: float = 0.1
    samples: int = 128
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ParameterError("--method", f"must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.bits not in _BITS[self.method]:
            known = ", ".join(map(str, _BITS[self.method]))
            raise ParameterError("--bits", f"must be one of {known} with {self.method}, got {self.bits}")
        if self.group not in _GROUPS:
            raise ParameterError("--group", f"must be one of {', '.join(map(str, _GROUPS))}, got {self.group}")
        if self.act_order not in ACT_ORDERS:
            raise ParameterError("--act-order", f"must be one of {', '.join(ACT_ORDERS)}, got {self.act_order!r}")
        if not 0.0 < self.damp < 1.0:
            raise ParameterError("--damp", f"must lie between 0 and 1, got {self.damp}")
        for flag, value, least in (("--samples", self.samples, 1), ("--length", self.length, 2)):
            if value < least:
                raise ParameterError(flag, f"must be at least {least}, got {value}")
        if not 0 <= self.seed < _SEEDS:
            raise ParameterError("--seed", f"must lie between 0 and {_SEEDS - 1}, got {self.seed}")

    @property
    def sym(self) -> bool:
        """``symmetric`` with the method's usual value for None."""
        return self.method != "awq" if self.symmetric is None else self.symmetric

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != "rtn"

    @property
    def reordered(self) -> bool:
        """Whether groups are made of columns that do not lie side by side."""
        return self.method == "gptq" and self.act_order == "group" and self.group > 0

    def as_dict(self) -> dict[str, Any]:
        """What must agree for a run to be resumed: all that has a say with this method, ``symmetric`` settled."""
        found = asdict(self) | {"symmetric": self.sym}
        if self.method != "gptq":
            del found["act_order"], found["damp"]
        if not self.calibrated:
            del found["samples"], found["length"], found["seed"]
        return found

    def quantization_config(self, left: Sequence[str] = ()) -> dict[str, Any]:
        """The entry of ``config.json``: AutoAWQ's for awq, AutoGPTQ's for the others.

        ``left`` are modules inside of layers that stay in 16 bits: the routers of a mixture of experts.
        """
        from importlib.metadata import version

        common = {"bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            exceptions = {"modules_to_not_convert": list(left)} if left else {}
            return {"quant_method": "awq", **common, "zero_point": not self.sym, "version": "gemm", **exceptions}
        kinds = sorted({name.rpartition(".")[2] for name in left})
        return {
            "quant_method": "gptq",
            **common,
            "sym": self.sym,
            "desc_act": self.reordered,
            "static_groups": self.method == "gptq" and self.act_order == "static",
            "true_sequential": self.method == "gptq",
            "damp_percent": self.damp,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"qiao:{version('qiao')}"], "method": self.method},
            **({"dynamic": {rf"-:.*\.({'|'.join(kinds)})$": {}}} if kinds else {}),
        }
