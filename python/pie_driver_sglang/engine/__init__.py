"""The engine core: what runs a loaded model, whichever backend loaded it.

``executor`` is the interface between the serving loop and what runs the model; `BackendExecutor`
(``backend_executor``) implements it.

=====================  =============================================================================
``backend_executor``   `BackendExecutor`: passes and sampling of the Python path
``staging``            views of the arrays that Rust lays out in the staging block
``hidden_states``      what a pass leaves for its logits, and what a graph needs of the executor
``graph_runner``       the graph path: ``cuda_graphs`` captures, ``eager_steps`` is for the CPU
``parallel_sampling``  which rank samples what, with tensor parallelism
``page_pools``         KV pages, their copies, the host's pool; ``state_pool`` has recurrent state
``vision``             image embeddings, and M-RoPE positions
``layers``             fused decoder layers
``lora``               LoRA adapters
``process_groups``     the groups of a model's ranks
``device``             the GPU's context, begun while libraries are imported; whether it is lost
``progress``           a progress bar, or log lines
``nvtx_ranges``        NVTX ranges for Nsight Systems
=====================  =============================================================================
"""
