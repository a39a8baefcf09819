"""The SGLang backend. Within it, only `compat` imports SGLang.

A start goes through these modules in this order:

==================  ================================================================================
``library``         `Library` for `driver`: options, versions, loading
``version``         whether the installed version of SGLang is supported
``environment``     what SGLang finds in the process while it is imported
``start``           from a configuration to a loaded rank
``compile_ahead``   compiles kernels during a start, for the shapes of ``compile_shapes``
``load``            a planner and an executor over the loaded model
``boot``            SGLang's settings, the memory plan, weights, KV pool, attention backend
``measure``         the sizes that the memory plan needs, and what the model took
``load_check``      every parameter is written and every tensor read
``support``         refuses models that SGLang computes wrongly; selects the attention backend
``model_backend``   `SglangBackend`: the loaded model, as `engine` runs it
``draft_head``      `EagleHead`: an EAGLE head, whose KV is in the model's pages
``weights``         the parameters, for updates while the model serves
``prompt_pooling``  embeddings of prompts over several passes, by files of sentence-transformers
``attention``       attention backends that SGLang calls
``lora``            which layers take LoRA adapters, and the slots of SGLang's manager
==================  ================================================================================
"""
