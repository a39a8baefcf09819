"""The configuration: the launcher's TOML, the options, what a model's own config says.

Imports neither torch nor SGLang.
"""
