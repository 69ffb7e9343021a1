"""Quantized weights: their forms, and how the tensors of each file format reach ``pack_weight``."""

from qiao.quantization.method import Method, method_of, settings_of
from qiao.quantization.weight import (
    DENSE,
    NO_FORMS,
    Forms,
    QuantizedWeight,
    Weight,
    WeightForm,
    common_form,
    concatenated,
    form_of,
    stack,
    take_rows,
)

__all__ = [
    "DENSE",
    "NO_FORMS",
    "Forms",
    "Method",
    "QuantizedWeight",
    "Weight",
    "WeightForm",
    "common_form",
    "concatenated",
    "form_of",
    "method_of",
    "settings_of",
    "stack",
    "take_rows",
]
