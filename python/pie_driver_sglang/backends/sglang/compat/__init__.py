"""Where the adapter reaches into SGLang: imports, private attributes, patches, resolved settings.

A port to another version of SGLang is work in this folder. `tools/check_compat.py` lists what that
version lacks; docs/sglang-upgrade.md says what has changed its meaning, and in which order to go.

======================  ===========================================================================
``process``             the environment that SGLang reads while it is imported; imports nothing
``texts``               errors of SGLang that only their words distinguish; imports nothing
``settings``            ``ServerArgs``: made, published, changed, and read once they are resolved
``model``               configuration, runner, and what SGLang does to both on a CPU
``loading``             the loader's functions that are watched, and updates of weights
``weight_parts``        where tensors of a checkpoint lie in SGLang's parameters
``corrections``         what SGLang computes wrongly without an error
``ranks``               ranks, groups, collective operations
``pools``               KV pools, block tables, recurrent state
``attention``           attention layers and backends
``passes``              batches, images, the capture of a graph
``pooling``             pooled rows of embedding models, and heads on them
``logits``              the end of a pass before its LM head, and the LM head alone
``lora``                the LoRA manager, its tables, the layers that it wraps
``layers``              Llama and Qwen taken apart for the fused kernels
``quantized``           FP8 matrices, and SGLang's products of them
``hooks``               what the plugins replace in SGLang's own server
``prefix_cache``        the interface of prefix caches there
``offline_peer``        SGLang's own engine, to be measured against
======================  ===========================================================================

A module that is imported when SGLang may be imported has its imports at the top. `process`, `texts`
and `ranks` are imported earlier, or in tests without SGLang.
"""
