"""Backends: inference libraries whose models the engine runs.

`sglang` loads SGLang's models and runs them by its `ModelRunner`. `vllm` loads vLLM's models and
runs them without its runner. `environment` is what both want of a process, `deferred_imports`
leaves torch's compiler out of imports, `weight_sizes` is what the memory plans of both read of a
model, and `load_trace` watches what is read of a checkpoint.
"""
