"""Which versions of Python the driver runs with. Imports nothing: it is asked first of all.

`requires-python` says the same, but uv ignores its upper bound, and SGLang then fails much later.
"""

OLDEST, NEWEST = (3, 11), (3, 12)


def refusal(version: tuple[int, int], executable: str) -> str:
    """What to print for a Python that SGLang is not made for; empty for one that it is.

    Args:
        version: `sys.version_info[:2]`.
        executable: `sys.executable`.
    """
    if OLDEST <= version <= NEWEST:
        return ""
    found = ".".join(map(str, version))
    return (
        f"pie_driver_sglang: Python {found} ({executable}) is not served: SGLang 0.5.17 needs 3.11 "
        "or 3.12; make the environment anew, e.g. with `uv venv --python 3.12`\n"
    )
