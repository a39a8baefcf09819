"""Where the server reaches into SGLang: its front end's launch, messages, process and counts.

================  ==================================================================================
``environment``   what SGLang reads of the processes while it is imported; imports nothing of it
``launching``     flags, the launch of the HTTP server, the schedulers that it starts
``forking``       the scheduler and the detokenizer as forks of the server, on the CPU
``edge``          the HTTP server with our limits, keys and media
``worker_app``    the same in one of several tokenizer workers
``workers``       the settings of several tokenizer workers
``managers``      the tokenizer managers, which refuse what is not served
``chats``         what SGLang's chat endpoint gets wrong
``ollama``        what its endpoints of Ollama get wrong
``tokens``        what its endpoints of tokens get wrong
``messages``      the classes of messages, and what answers them
``image_inputs``  images of a request, as SGLang's processors leave them
``prometheus``    the scheduler's metrics, and the times of requests
``tensors``       adapters that a client sends
``scheduling``    what SGLang expects of a scheduler's process
``replicas``      the controller of replicas, which sleeps while no message comes
``loads``         the counts that `/v1/loads` reads
================  ==================================================================================
"""
