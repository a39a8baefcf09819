"""The files of a checkpoint: what they hold, before and during SGLang's own loading.

`weights.py` reads the headers of safetensors files and computes what the weights take on a device.
`hub_cache.py` finds or downloads a model of the Hugging Face hub. `regions.py` tracks which bytes
of a tensor have been written, `surplus.py` decides which tensors a model may do without, and
`regular_file.py` reads files that others made. `types.py` has what several of them use. Imports
neither torch nor SGLang, and reads no weights.
"""
