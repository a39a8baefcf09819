"""What only SGLang 0.5.17 has.

=================  ==========================================================================
``settings``       fields of `ServerArgs` are resolved when it is made, and read from it
``ranks``          `ModelRunner` is given a `ParallelState`
``layers``         fields of routers, and the final norm of Granite 4
``lora``           the LoRA manager's call before a capture
``passes``         attention backends read the block table
``prefix_cache``   the interface of prefix caches, of which 0.5.23 has another
=================  ==========================================================================
"""
