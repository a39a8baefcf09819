"""Memory planning: how a device's memory is divided before a model is loaded.

`plan.py` computes a `Plan` from the sizes of a device, a model (`sizes.py`) and the settings; the
types are in `plan_types.py`. `refusal.py` rejects a model that does not fit, and names one option
that would make it fit. `batch_sizes.py` chooses the sizes of passes and CUDA graphs, `graphs.py`
lists the graphs; `host.py` reads the host's memory, and `gpus.py` the GPUs from NVML; `units.py`
has MiB and GiB. Imports neither torch nor SGLang.
"""
