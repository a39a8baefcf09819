"""The files of a checkpoint: what they hold, before and during SGLang's own loading.

`weights.py` reads the headers of safetensors files and computes what the weights take on a device.
`hub_cache.py` finds or downloads a model of the Hugging Face hub, `packaged.py` one of a Python
package index; `gguf_cache.py` keeps converted GGUF files of users, and
`converted_models.py` lists and removes both. `regions.py` tracks which bytes
of a tensor have been written, `unread_tensors.py` decides which tensors a model may do without, and
`regular_file.py` reads files that others made. `replacement.py` compares a checkpoint with the one
that is served, `weight_files.py` hands weights to other processes, `pooling.py` reads how
embeddings are pooled. `tensors.py` has what several of them use. Only `gguf.py`, which converts
GGUF files in a process of its own, imports torch and reads weights.
"""
