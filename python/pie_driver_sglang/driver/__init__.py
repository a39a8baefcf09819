"""The driver process as the Pie runtime starts it.

`launch.py` is the start: configuration, region, model, warm-up, handshake (`handshake.py`). Then
`serving_loop.py` runs the batches, copies and adapter loads (`loads.py`) that need Python, until
SIGTERM. `types.py` has what is announced. `failures.py` decides whether the driver goes on after an
exception, and `trace.py` records steps. Knows a `ModelExecutor` (`engine/executor.py`), and no type
of SGLang.
"""
