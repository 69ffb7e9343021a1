"""Quantizing a model to 2 to 8 bits: GPTQ, AWQ, and rounding to the nearest, layer by layer."""

from qiao.quantize.calibration import read_samples
from qiao.quantize.options import ACT_ORDERS, METHODS, Options
from qiao.quantize.run import Device, Report, quantize, stored_dtype

__all__ = ["ACT_ORDERS", "METHODS", "Device", "Options", "Report", "quantize", "read_samples", "stored_dtype"]
