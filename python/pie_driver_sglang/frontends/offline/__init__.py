"""The offline engine: `pie_driver_sglang.Engine`, without a server.

It starts drivers and submits requests to the native runtime (`_core.Runtime`), which schedules
them. This package tokenizes and detokenizes. Arguments, parameters and outputs have SGLang's
names. Neither torch nor SGLang is imported in the caller's process, unless a prompt has
images.

======================  ============================================================================
``engine``              `Engine`: its calls, from prompts to outputs
``prompts``             validates and tokenizes the prompts of a call
``generate_arguments``  arguments of `generate` besides prompts and sampling parameters
``sampling``            SGLang's sampling parameters; ``logprobs`` has those of log-probabilities
``hidden_states``       which hidden states are requested, and SGLang's form of them
``images``              images of prompts, by the model's own processor
``input_embeds``        prompts that are given as embeddings
``requests``            open requests, and the thread that delivers their outputs
``weights``             weight updates, and release of GPU memory
``adapters``            LoRA adapters, loaded and unloaded while requests run
``processes``           process ids, and garbage collection
``profiling``           `Engine.start_profile`, and the trace of a block of code
``embeddings``          `Engine.encode` and `Engine.rerank`
``scoring``             `Engine.score`, by `generate` and `encode`
``unsupported``         methods of SGLang's `Engine` that are missing, with hints
``error_notes``         errors with their hints as notes
``outputs``             outputs in the form of SGLang's `Engine.generate`
======================  ============================================================================

Arguments, tokenizer and adapters are shared with the servers: `frontends/common`.
"""
