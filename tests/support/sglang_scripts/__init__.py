"""Scripts and functions that run in a process that has imported SGLang."""
