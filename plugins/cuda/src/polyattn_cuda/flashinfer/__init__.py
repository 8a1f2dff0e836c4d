"""Adapters of FlashInfer (https://github.com/flashinfer-ai/flashinfer): its own kernels behind plan-and-run wrappers,
and the TensorRT-LLM and CuTe DSL kernels that it carries.

What is true of all of them: an LSE has base 2; a wrapper's plan is host work that waits for nothing but reads lengths
on the host; a workspace belongs to one wrapper at a time; sinks of the wrappers' own kernels are dropped in silence.
"""
