"""The SGLang adapter. What of SGLang it reaches is in `compat`, and nothing else imports SGLang.

A start goes through these modules in this order:

==================  ================================================================================
``version``         whether the installed SGLang is the one that this is written for
``environment``     what SGLang and torch find in the process while they are imported
``device``          the GPU's context, begun while SGLang is imported; whether a device is lost
``start``           from a configuration to a loaded rank
``load``            a planner and an engine that fit each other
``process_groups``  the groups of a model's ranks
``boot``            SGLang's settings, the memory plan, weights, KV pool, attention backend
``measure``         the sizes that the memory plan needs, and what the model took
``load_check``      every parameter is written and every tensor read; ``load_trace`` watches
``support``         what SGLang computes wrongly is refused; which attention backend a model gets
``progress``        a bar, or now and then a log line
==================  ================================================================================

The executor runs passes, and makes the graphs that Rust launches:

=====================  =============================================================================
``executor``           `SglangExecutor`: passes and sampling of the Python path
``staging``            views of the arrays that Rust lays out in the staging block
``hidden_states``      what a pass leaves for its logits, and what a graph needs of the executor
``graph_runner``       the graph path: ``cuda_graphs`` captures, ``eager_steps`` is for the CPU
``parallel_sampling``  which rank samples what, with tensor parallelism
``page_pools``         KV pages, their copies, the host's pool; ``state_pool`` has recurrent state
``vision``             image embeddings, and M-RoPE positions
``lora``               LoRA adapters
``nvtx_ranges``        marks for Nsight Systems
=====================  =============================================================================

Which kernels a model runs with is decided once, at its start: ``attention`` has the attention
backends, ``layers`` the fused decoder layers.
"""
