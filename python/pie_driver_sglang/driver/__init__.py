"""The driver process as the Pie runtime starts it.

`startup.py` starts it: configuration, region, model, warm-up, handshake (`handshake.py`, with the
`capabilities.py` that it announces). Then `serving_loop.py` runs the batches, copies and adapter
loads (`adapter_loads.py`) that need Python, until SIGTERM. `failures.py` decides whether the driver
continues after an exception, `control_channel.py` receives updates of weights from a frontend, and
`trace.py` records steps. Depends on `ModelExecutor` (`engine/executor.py`) and on the `Library`
that it is started with (`library.py`), and on no type of SGLang or vLLM.
"""
