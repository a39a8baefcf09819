"""Where the adapter reaches into SGLang: imports, private attributes, patches, resolved settings.

What differs between the supported versions of SGLang is in a folder for each, `v0517` and `v0523`,
behind the protocols of `protocols`; `selection` chooses by the installed version. A port to another
version is work in this folder. `tools/check_compat.py` lists what a version lacks;
docs/sglang-upgrade.md says what has changed its meaning, and in which order to go.

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
``draft_head``          SGLang's classes of EAGLE heads, loaded beside a model
``jit_builds``          kernels that nvcc compiles at their first use
``lora``                the LoRA manager, its tables, the layers that it wraps
``layers``              Llama and Qwen taken apart for the fused kernels
``quantized``           FP8 matrices, and SGLang's products of them
``preload``             what the fork server imports besides the adapter
``hooks``               what the plugins replace in SGLang's own server
``offline_peer``        SGLang's own engine, to be measured against
``protocols``           what differs between versions
``selection``           the modules of the installed version
``v0517``               what only 0.5.17 has
``v0523``               what only 0.5.23 has
======================  ===========================================================================

A module that is imported when SGLang may be imported has its imports at the top. `process`, `texts`
and `ranks` are imported earlier, or in tests without SGLang.
"""
