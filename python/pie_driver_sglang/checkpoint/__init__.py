"""The files of a checkpoint: what they hold, before and during SGLang's own loading.

`weights.py` reads the headers of safetensors files and computes what the weights take on a device.
`regions.py` tracks which bytes of a tensor have been written, `surplus.py` decides which tensors a
model may do without, and `regular_file.py` reads files that others made. Imports neither torch nor
SGLang, and reads no weights.
"""
