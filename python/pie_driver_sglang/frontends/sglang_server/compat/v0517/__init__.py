"""What only the server of SGLang 0.5.17 has.

================  ==========================================================================
``launch``        keys are fields of the settings that the warm-up reads; `uvicorn.run`
``scheduler``     13 positional arguments; ranks are an argument of the metrics
``image_inputs``  reads the images that SGLang's processors leave in a request, as a pickle
``endpoints``     streamed `top_logprobs` repeat those of a chunk's first token
================  ==========================================================================
"""
