"""The engine for programs without a server: `pie_driver_sglang.Engine`.

It starts drivers, and hands requests to the native runtime (`_core.Runtime`), which schedules them.
Here are only text and tokens, SGLang's names for arguments and parameters, and the answers' form.
Neither torch nor SGLang is imported in the caller's process.
"""
