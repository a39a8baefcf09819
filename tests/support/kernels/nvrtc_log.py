"""CUDA C++ sources compiled by NVRTC without a GPU, with what the compilers say of them."""

from __future__ import annotations

from typing import Any

from cuda.bindings import nvrtc

from pie_driver_sglang.kernels.cuda.compiled import read_source


def nvrtc_makes(file: str, constants: dict[str, int], arch: str) -> tuple[str, str]:
    """The kernel in PTX if `arch` is a virtual one, and what the compilers said."""

    def call(function: Any, *arguments: Any) -> Any:
        status, *found = function(*arguments)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function, status)
        return found[0] if found else None

    source = read_source(file).encode()
    program = call(nvrtc.nvrtcCreateProgram, source, file.encode(), 0, [], [])
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    options += [] if arch.startswith("compute") else ["--ptxas-options=-v"]
    call(nvrtc.nvrtcCompileProgram, program, len(options), [each.encode() for each in options])
    log = bytes(call(nvrtc.nvrtcGetProgramLogSize, program))
    call(nvrtc.nvrtcGetProgramLog, program, log)
    code = bytes(call(nvrtc.nvrtcGetPTXSize, program))
    call(nvrtc.nvrtcGetPTX, program, code)
    return code.decode(errors="replace"), log.decode()
