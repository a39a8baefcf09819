"""Where the server reaches into SGLang: its front end's launch, messages, process and counts.

===============  ==================================================================================
``environment``  what SGLang reads of the processes while it is imported; imports nothing of it
``launching``    flags, the launch of the HTTP server, the schedulers that it starts
``managers``     the tokenizer managers, which refuse what is not served
``messages``     the classes of messages, and what answers them
``metrics``      the scheduler's metrics, and the times of requests
``tensors``      adapters that a client sends as tensors
``scheduling``   what SGLang expects of a scheduler's process
``loads``        the counts that `/v1/loads` reads
===============  ==================================================================================
"""
