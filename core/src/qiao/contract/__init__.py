"""The only package that a plugin imports: markers, frozen records, one specification class per family, the catalog."""

from qiao.contract.allocation import AllocationSpec
from qiao.contract.attention import AttentionSpec
from qiao.contract.catalog import CATALOG, GROUPS, Operand, OpSpec
from qiao.contract.device import DeviceSpec
from qiao.contract.fused import FusedSpec
from qiao.contract.markers import CONTRACT_VERSION, GROUP, GROUP_PREFIX, PROJECT, hookimpl, hookspec
from qiao.contract.matmul import MatmulSpec
from qiao.contract.sampling import SamplingSpec
from qiao.contract.shapes import AttentionShape, LinearShape, ModelShape, StepShape
from qiao.contract.types import (
    AttentionMetadata,
    Capabilities,
    DeviceInfo,
    KVCache,
    LogprobOutput,
    MemoryInfo,
    PackedWeight,
    PenaltyTensors,
    SamplingTensors,
    Tolerance,
    UnreadLengths,
    WeightInfo,
)

SPECS = (DeviceSpec, AllocationSpec, AttentionSpec, SamplingSpec, MatmulSpec, FusedSpec)
"""One specification class per family."""

__all__ = [
    "CATALOG",
    "CONTRACT_VERSION",
    "GROUP",
    "GROUPS",
    "GROUP_PREFIX",
    "PROJECT",
    "SPECS",
    "AllocationSpec",
    "AttentionMetadata",
    "AttentionShape",
    "AttentionSpec",
    "Capabilities",
    "DeviceInfo",
    "DeviceSpec",
    "FusedSpec",
    "KVCache",
    "LinearShape",
    "LogprobOutput",
    "MatmulSpec",
    "MemoryInfo",
    "ModelShape",
    "OpSpec",
    "Operand",
    "PackedWeight",
    "PenaltyTensors",
    "SamplingSpec",
    "SamplingTensors",
    "StepShape",
    "Tolerance",
    "UnreadLengths",
    "WeightInfo",
    "hookimpl",
    "hookspec",
]
