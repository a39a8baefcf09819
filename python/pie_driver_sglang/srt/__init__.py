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

The engine runs passes, and makes the graphs that Rust launches:

=================  =================================================================================
``sglang_engine``  `ModelEngine`: passes and sampling of the Python path
``block``          views of the arrays that Rust lays out
``hidden``         what a pass leaves for its logits, and what a graph needs of the engine
``steps``          the graph path: ``cuda_steps`` captures graphs, ``cpu_steps`` calls the model
``rank_slots``     which rank samples what
``pool``           KV pages, their copies, the host's pool; ``state`` has recurrent state
``images``         images, and positions on three axes
``adapters``       LoRA: ``adapter_files`` are checked, ``adapter_loader`` reads them in a thread
``nvtx_ranges``    marks for Nsight Systems
=================  =================================================================================

Which kernels a model runs with is decided once, at its start:

====================  ==============================================================================
``paged_attention``   the backend `pie`: decodes that read whole pages
``masked_attention``  attention under masks of users
``fused``             the choice of fused layers
``dense``             those of plain numbers
``few_rows``          fused layers in steps of few rows, and mixtures of experts
``quantized``         fused layers of FP8 weights
====================  ==============================================================================

`plugins` brings two parts of the driver into SGLang's own server.
"""
