"""What only SGLang 0.5.23 has.

=================  ==========================================================================
``settings``       `ServerArgs` keeps what was passed in; resolved values are in namespaces
``ranks``          a rank is published with the settings, and kept in `get_parallel()`
``layers``         fields of routers
``lora``           the LoRA manager's call before a capture
``passes``         attention backends read a plan of KV indices
``prefix_cache``   the interface of tree cores, of which 0.5.17 has none
=================  ==========================================================================
"""
