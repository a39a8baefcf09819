"""Backends: inference libraries whose models the engine runs.

`sglang` is the only one: it loads SGLang's models and runs them by its `ModelRunner`.
"""
