"""The vLLM backend. What of vLLM it reaches is in `compat`, and nothing else imports vLLM.

vLLM's loader, model classes and kernels run under the engine's pages, block table and order
of work: no `LLM`, scheduler or model runner of vLLM. A start goes through these modules:

==================  ================================================================================
``library``         `Library` for `driver`: options, versions, loading
``version``         whether the installed vLLM is the one that this is written for
``start``           from a configuration to a loaded rank
``boot``            vLLM's settings, the memory plan, process groups, weights, KV pages
``measure``         the sizes that the memory plan needs
``load_check``      every parameter is written by the checkpoint, of which no tensor is cut
``attention``       attention over our pages on a GPU
``lora``            LoRA adapters: which layers take them, and their slots
``support``         models that are refused, with the reason
``model_backend``   `VllmBackend`: the loaded model, as `engine` runs it
==================  ================================================================================
"""
