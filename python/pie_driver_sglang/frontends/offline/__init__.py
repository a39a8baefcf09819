"""The engine for programs without a server: `pie_driver_sglang.Engine`.

It starts drivers, and hands requests to the native runtime (`_core.Runtime`), which schedules them.
Here are only text and tokens, SGLang's names for arguments and parameters, and the answers' form.
Neither torch nor SGLang is imported in the caller's process.

==================  ================================================================================
``engine``          `Engine`: a call from its prompts to its answers
``prompts``         the prompts of a call, checked, with their tokens
``call_arguments``  what a call may say besides prompts and sampling
``sampling``        SGLang's sampling parameters; ``logprobs`` has those of log-probabilities
``requests``        the thread that brings outputs to the calls that wait for them
``answers``         outputs in the form in which SGLang's engine gives them
==================  ================================================================================

Arguments, tokenizer and adapters are shared with the servers: `frontends/common`.
"""
