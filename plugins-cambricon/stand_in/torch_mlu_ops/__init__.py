"""Stands in for torch_mlu_ops: the documented signatures, every documented rule checked, numbers computed on the host.

What breaks a rule raises ``RuleError``. ``QIAO_MLU_OPS=old`` gives the names of releases before 1.12, anything else the
newer ones. It is written from public signatures and shares no code with the vendor.
"""

# ruff: noqa: F401 - the names that the vendor's package has
import os

import torch_mlu  # the device must be there

from torch_mlu_ops._rules import RuleError
from torch_mlu_ops.attention import (
    dequant_from_paged_cache,
    flash_attention,
    quant_to_paged_cache,
    reshape_paged_cache,
    single_query_cached_kv_attn,
)
from torch_mlu_ops.light import active, apply_rotary, fused_rms_norm
from torch_mlu_ops.linear import matmul
from torch_mlu_ops.moe import group_gemm, moe_combine_result, moe_gen_idx, moe_softmax_topk, smooth_quant_group_gemm

if os.environ.get("QIAO_MLU_OPS") == "old":
    from torch_mlu_ops.older import per_token_smooth_quantize, smooth_quant_matmul, weight_only_quant_matmul
else:
    from torch_mlu_ops.newer import scaled_matmul, scaled_quantize

__version__ = "stand-in"
