"""Prefill/decode disaggregation with different tensor-parallel sizes on SGLang."""

__version__ = "0.1.0"
