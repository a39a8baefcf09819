"""A Pie driver on vLLM: the process that runs a model's forward passes for the Pie runtime.

`python -m pie_driver_vllm` starts it (`__main__`). Everything else is shared with the driver on
SGLang and lies in `pie_driver_sglang`: the engine, the driver's start-up and serving loop, and the
backend of vLLM, `backends/vllm`. Neither torch nor vLLM is imported before the model is loaded, and
SGLang never.
"""

# Nothing is imported here: `python -m` searches the working directory until `__main__` forbids it.
__all__: list[str] = []
