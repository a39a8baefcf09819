"""Messages of the installed SGLang's own classes, for the unit tests of `rust/frontends`.

    python tests/support/sglang_scripts/message_vectors.py [--write]

Prints the file's name and whether it is current; with ``--write`` it is written. A file has the
class table, messages as the tokenizer manager sends them, and what has to be read of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec

from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.frontends.sglang_server.compat import server_environment

FOLDER: Final = Path(__file__).parents[3] / "rust/frontends/tests/sglang_zmq/vectors"
PROMPT: Final = [5, 6, 7, 296, 296, 8, 296, 296, 296, 9]
SPANS: Final = [[3, 5], [6, 9]]
"""Ranges of the tokens of both images."""
GRIDS: Final = [[1, 2, 4], [1, 6, 2]]
VALUES: Final = 3
"""Values of a patch."""
SEGMENT: Final = "sgl_shm_mm_0000000000_vector"
"""Name of shared memory, which the test replaces by one of its own of the same length."""


def request(rid: str, **fields: Any) -> Any:
    """A `TokenizedGenerateReqInput`."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=4, temperature=0.5)
    params.normalize(None)
    values = {
        "input_text": "text",
        "input_ids": array("q", PROMPT),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    made = TokenizedGenerateReqInput(**{**values, **fields})
    made.rid = rid
    return made


def embedding(rid: str) -> Any:
    """A `TokenizedEmbeddingReqInput`."""
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    known = {field.name: field for field in msgspec.structs.fields(TokenizedEmbeddingReqInput)}
    values = {"input_text": "text", "input_ids": array("q", PROMPT), "dimensions": 8}
    for name, field in known.items():
        if field.required and name not in values:
            values[name] = None
    values["sampling_params"] = SamplingParams()
    made = TokenizedEmbeddingReqInput(**values)
    made.rid = rid
    return made


def pixels(first: int, data_type: Any) -> Any:
    """Pixels of an image, which are exact in all types."""
    import torch

    patches = GRIDS[first][0] * GRIDS[first][1] * GRIDS[first][2]
    values = torch.arange(patches * VALUES, dtype=torch.float32).reshape(patches, VALUES)
    return (values / 4 - first * 3).to(data_type)


def positions() -> Any:
    """M-RoPE positions of the prompt, int64 `[3, tokens]`."""
    import torch

    axes = torch.zeros((3, len(PROMPT)), dtype=torch.int64)
    following = 0
    for token in range(len(PROMPT)):
        span = next((span for span in SPANS if span[0] <= token < span[1]), None)
        if span is None:
            axes[:, token] = following
            following += 1
            continue
        axes[:, token] = following
        axes[2, token] += (token - span[0]) % 2
        if token + 1 == span[1]:
            following = int(axes[:, span[0] : span[1]].max()) + 1
    return axes


def item(numbers: list[int], feature: Any, grids: Any, modality: str = "IMAGE") -> Any:
    """A `MultimodalDataItem` with these images."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    return MultimodalDataItem(
        modality=Modality[modality],
        offsets=[(SPANS[number][0], SPANS[number][1] - 1) for number in numbers],
        feature=feature,
        model_specific_data={"image_grid_thw": grids},
    )


def shared(tensor: Any) -> Any:
    """What stands in a message for a tensor in shared memory, without the memory."""
    from sglang.srt.managers.mm_utils import ShmPointerMMData

    pointer = ShmPointerMMData.__new__(ShmPointerMMData)
    pointer.__dict__.update(shm_name=SEGMENT, shape=tensor.shape, dtype=tensor.dtype)
    pointer.precomputed_hash = None
    # What its destructor looks at.
    pointer._shm_handle = pointer.tensor = None
    return pointer


def media() -> dict[str, Any]:
    """Outputs of processors by what they show."""
    import torch
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    grids = torch.tensor(GRIDS)
    both = torch.cat([pixels(0, torch.float32), pixels(1, torch.float32)])
    of_each = [
        item([1], pixels(1, torch.float16), grids[1:].numpy()),
        item([0], pixels(0, torch.bfloat16), grids[:1].int()),
    ]
    items = {
        "in_one_item": [item([0, 1], both, grids)],
        "in_two_items": of_each,
        "in_shared_memory": [item([0, 1], shared(both), grids)],
        "video": [item([0, 1], both, grids, "VIDEO")],
        "no_pixels": [item([0, 1], None, grids)],
        "another_grid": [item([0, 1], both, grids + 1)],
        "a_list": [item([0, 1], [shared(both)], grids)],
    }
    axes = positions()
    return {
        name: MultimodalProcessorOutput(mm_items=found, mrope_positions=axes)
        for name, found in items.items()
    }


def vectors() -> bytes:
    """The file of the installed version."""
    import torch
    from sglang.srt.managers import io_struct

    from pie_driver_sglang.frontends.sglang_server.compat import messages
    from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat

    batch = io_struct.BatchTokenizedGenerateReqInput(batch=[request("a"), request("b")])
    batch.rids = ["a", "b"]
    sent = {"text": request("a"), "batch": batch, "embedding": embedding("a")}
    if scheduler_compat().media_classes():
        sent |= {name: request("a", mm_inputs=found) for name, found in media().items()}
    else:
        # Pickles, of which the frontend reads nothing.
        pickled = io_struct.PickleWrapper(b"a pickle")
        sent["pickled"] = request("a", mm_inputs=pickled)
    images = [pixels(number, torch.float32) for number in range(len(GRIDS))]
    axes = positions()
    content = {
        "classes": messages.message_table(),
        "messages": {name: messages.encode_message(found) for name, found in sent.items()},
        "prompt": PROMPT,
        "images": [
            {
                "start": start,
                "tokens": end - start,
                "grid": grid,
                "pixels": image.numpy().tobytes(),
                "mrope_positions": axes[:, start:end].T.flatten().tolist(),
            }
            for (start, end), grid, image in zip(SPANS, GRIDS, images, strict=True)
        ],
        "segment": SEGMENT,
    }
    return msgspec.msgpack.encode(content)


def main() -> None:
    """Compare the file with the installed version, or write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    server_environment.prepare_server(["Qwen3ForCausalLM"], on_cpu=True)
    path = FOLDER / f"sglang_{adapter_version().sglang}.msgpack"
    with server_environment.importing_server():
        data = vectors()
    if parser.parse_args().write:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    is_current = path.exists() and path.read_bytes() == data
    print(json.dumps({"file": path.name, "is_current": is_current}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
