"""Where the server reaches into SGLang: its front end's launch, messages, process and counts.

===============  ==================================================================================
``environment``  what SGLang reads of the processes while it is imported; imports nothing of it
``launching``    flags, the launch of the HTTP server, the schedulers that it starts
``messages``     the classes of messages, and what answers them
``scheduling``   what SGLang expects of a scheduler's process
``loads``        the counts that `/v1/loads` reads
===============  ==================================================================================
"""
