"""The engine core: what runs a loaded model, whichever inference library loaded it.

``executor`` is the interface to the serving loop, ``backend`` that to the library. Nothing here
imports a library's package: `ModelBackend` is all that the core needs of it.

=====================  =============================================================================
``build``              from a loaded model to a planner and an executor
``invariance_check``   whether hidden states depend on the batch
``backend_features``   what only some libraries offer: recurrent state, LoRA, weight updates
``backend_executor``   `BackendExecutor`: passes and sampling of the Python path
``custom_processors``  Python that requests bring, on their own rows of logits
``block_table``        the KV slots of each request
``staging``            views of the arrays that Rust lays out in the staging block
``graph_runner``       the graph path: ``cuda_graphs`` captures, ``eager_steps`` is for the CPU
``model_drafts``       drafts of an EAGLE head, at the end of a step
``parallel_sampling``  which rank samples what, with tensor parallelism
``page_pools``         KV pages, their copies, the host's pool; ``state_pool`` has recurrent state
``attention``          paged decode attention
``layers``             fused decoder layers
``lora``               LoRA adapters
``vision``             image embeddings, and M-RoPE positions
``input_embeds``       tokens that bring their embeddings
``process_groups``     the groups of a model's ranks
``device``             the GPU's context, begun while libraries are imported; whether it is lost
``weight_control``     updates of weights, by ``control_commands``; ``folded_norms`` follow them
``update_groups``      process groups by which a trainer sends weights
``kernel_profile``     torch's profiler around the passes of a rank
``sleep``              the memory of weights and KV, released and taken again; that of a GPU by
                       ``memory_saver``
``progress``           a progress bar, or log lines
``nvtx_ranges``        NVTX ranges for Nsight Systems
=====================  =============================================================================
"""
