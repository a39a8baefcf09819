"""Batches of requests from files, in OpenAI's format: for the HTTP server and `pie-sglang batch`.

Files, batches and the result of every line are records of one SQLite database. A line counts as
done once its result is committed, and an output file is assembled from committed results at the
end; so a process that is killed at any moment loses no line and runs none twice into the output.

=================  =================================================================================
``batch_records``  files and batches as records, and as OpenAI's objects
``batch_store``    the SQLite database and the folder of files
``output_files``   assembles the output files of a batch, and ends it
``storage_lock``   one server runs the batches of a folder
``input_lines``    reads and validates input files
``line_slots``     how many lines run at once, with and without interactive traffic
``line_requests``  sends the request of a line, again after transient errors
``offline_run``    a run of `pie-sglang batch`, which a second run continues
``batch_runner``   runs one batch from its present state to its end
=================  =================================================================================
"""
