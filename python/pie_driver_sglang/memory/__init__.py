"""Memory before it is taken: plans, refusals, what a checkpoint weighs.

Imports neither torch nor SGLang.
"""
