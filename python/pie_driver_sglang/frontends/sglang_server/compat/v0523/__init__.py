"""What only the server of SGLang 0.5.23 has.

===============  ============================================================================
``launch``       keys are published with the settings; a `uvicorn.Server`
``scheduler``    10 positional arguments; ranks are those of `get_parallel()`
``endpoints``    samples of a request have ids of their own
===============  ============================================================================
"""
