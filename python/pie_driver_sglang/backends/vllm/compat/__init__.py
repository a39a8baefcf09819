"""All that is imported of vLLM, and its private parts. Decides nothing.

==================  ================================================================================
``process``         what vLLM reads of a process before it is imported; imports nothing of it
``settings``        `EngineArgs`, the resolved configuration, what it changes in the process
``model``           process groups, the loader, layers with KV, LM head
``ranks``           how groups of several ranks are made, and `VllmGroup`
``passes``          attention metadata and the forward context of a pass
``attention``       the attention backend of a GPU, and vLLM's kernels for it
``lora``            layers that apply LoRA adapters, and which rows apply which
``layers``          weights of the decoder layers that fused kernels take the place of
==================  ================================================================================
"""
