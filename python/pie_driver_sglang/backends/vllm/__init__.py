"""The vLLM backend. Within it, only `compat` imports vLLM.

It uses vLLM's loader, model classes and kernels. KV pages, block table and scheduling are
the engine's: vLLM's `LLM`, scheduler and model runner do not run. A start goes
through these modules:

==================  ================================================================================
``library``         `Library` for `driver`: options, versions, loading
``version``         whether the installed version of vLLM is supported
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
