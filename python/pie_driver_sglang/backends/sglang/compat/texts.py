"""What SGLang says only in words: errors that have no type of their own. Imports nothing of it.

Where a version has other words, the driver still says what SGLang said, but its hint is general.
"""

from __future__ import annotations


def lacks_architecture(text: str) -> bool:
    """Whether an error says that SGLang has no such model."""
    return "not supported" in text and "rchitecture" in text


def without_list(text: str) -> str:
    """The same error without the list of all architectures."""
    return text.partition("Supported architectures")[0]


def finds_other_processes(text: str) -> bool:
    """Whether an error says that the ranks' GPUs do not have the same memory left."""
    return "capacity is unbalanced" in text


def lacks_memory(text: str) -> bool:
    """Whether an error says that memory is not enough."""
    return "memory" in text.lower()


def has_no_pool(error: Exception) -> bool:
    """Whether an error says that what the weights have left holds no KV pool."""
    return "memory" in str(error)
