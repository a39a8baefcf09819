"""Memory planning: how a device's memory is divided before a model is loaded.

`plan.py` computes a `Plan` from the sizes of a device, a model (`sizes.py`) and the settings.
`refusal.py` refuses a model that does not fit, and names one key that would make it fit.
`limits.py` chooses the sizes of passes and CUDA graphs, `graphs.py` lists the graphs, `host.py`
asks the host for its memory, and `gpus.py` NVIDIA's driver for GPUs. `types.py` has the types that
other packages use. Imports neither torch nor SGLang.
"""
