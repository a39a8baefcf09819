"""The command `pie-sglang`: looks at a machine, checks configurations, plans memory.

Each command is a module with a function `main(arguments) -> int`. `program.py` finds and runs it.
Neither torch nor SGLang is imported here.
"""
