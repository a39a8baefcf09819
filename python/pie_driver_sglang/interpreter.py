"""The supported versions of Python. Imports nothing, because it is checked first.

`requires-python` has the same range, but uv ignores its upper bound.
"""

OLDEST, NEWEST = (3, 11), (3, 12)


def refusal(version: tuple[int, int], executable: str) -> str:
    """The message for an unsupported version of Python; empty for a supported one.

    Args:
        version: `sys.version_info[:2]`.
        executable: `sys.executable`.
    """
    if OLDEST <= version <= NEWEST:
        return ""
    found = ".".join(map(str, version))
    return (
        f"pie_driver_sglang: Python {found} ({executable}) is not served: SGLang needs 3.11 "
        "or 3.12; make the environment anew, e.g. with `uv venv --python 3.12`\n"
    )
