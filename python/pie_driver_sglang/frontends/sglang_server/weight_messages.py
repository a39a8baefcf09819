"""SGLang's messages about weights and memory, as work for a thread, and what is replied to them."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pie_driver_sglang.errors import DriverError, WeightsError, quoted
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates, UpdateResult
from pie_driver_sglang.frontends.sglang_server.compat import weight_tensors

logger = logging.getLogger(__name__)

Reply = dict[str, Any]
"""Fields of SGLang's reply."""
_DONE: Final[Reply] = {"success": True, "message": "Success"}
_UNREAD: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "selector": (("all", "target"), "there is no draft model; send `all` or `target`"),
    "skip_tensor_list": ((None, []), "all tensors are checked; leave it out"),
}
"""Fields of some messages of some versions: which values are supported, and why no other is."""


class WeightSession:
    """What SGLang 0.5.23 wants around updates: `/begin_weight_update`, `/end_weight_update`.

    SGLang unpacks weights at its begin and packs them at its end. Each update here does both, so a
    session does no more than keep two trainers apart, and updates need none.
    """

    def __init__(self) -> None:
        """No session is open."""
        self._open = threading.Lock()

    def begin(self, updates: ModelUpdates, message: Any) -> Reply:
        """Open it.

        Raises:
            WeightsError: It is open.
        """
        if not self._open.acquire(blocking=False):
            raise WeightsError(
                "a weight-update session is open", "call `/end_weight_update` before"
            )
        return _DONE

    def end(self, updates: ModelUpdates, message: Any) -> Reply:
        """Close it.

        Raises:
            WeightsError: None is open.
        """
        if not self._open.locked():
            raise WeightsError(
                "no weight-update session is open", "call `/begin_weight_update` before"
            )
        self._open.release()
        return _DONE


def handlers(updates: ModelUpdates) -> Mapping[str, Callable[[Any], Reply]]:
    """What handles each message, by its class; blocks until the drivers have answered."""
    session = WeightSession()
    found: dict[str, Callable[[ModelUpdates, Any], Reply]] = {
        "BeginWeightUpdateReqInput": session.begin,
        "EndWeightUpdateReqInput": session.end,
        "UpdateWeightFromDiskReqInput": _from_disk,
        "UpdateWeightsFromTensorReqInput": _from_tensors,
        "UpdateWeightsFromDistributedReqInput": _from_group,
        "InitWeightsUpdateGroupReqInput": _join,
        "DestroyWeightsUpdateGroupReqInput": _leave,
        "GetWeightsByNameReqInput": _read,
        "CheckWeightsReqInput": _check,
        "ReleaseMemoryOccupationReqInput": _release,
        "ResumeMemoryOccupationReqInput": _resume,
    }
    return {name: functools.partial(_replied, work, updates) for name, work in found.items()}


def _replied(
    work: Callable[[ModelUpdates, Any], Reply], updates: ModelUpdates, message: Any
) -> Reply:
    try:
        for name, (supported, why) in _UNREAD.items():
            value = getattr(message, name, supported[0])
            if value not in supported:
                raise WeightsError(f"`{name}` is {quoted(value)}: {why}")
        return work(updates, message)
    except DriverError as error:
        return _failure(error.with_hint)
    except Exception as error:
        logger.exception("a %s failed", type(message).__name__)
        return _failure(f"{type(error).__name__}: {error}")


def _failure(reason: str) -> Reply:
    # Replies without a field for it carry the reason as their id, where the manager looks.
    return {"success": False, "message": reason, "rid": reason}


def _result(outcome: UpdateResult) -> Reply:
    return outcome._asdict()


def _common(message: Any) -> dict[str, Any]:
    """What all updates have."""
    return {"flush": bool(message.flush_cache), "version": message.weight_version}


def _from_disk(updates: ModelUpdates, message: Any) -> Reply:
    given = (message.model_path, message.load_format)
    return _result(updates.update_from_disk(*given, **_common(message)))


def _from_tensors(updates: ModelUpdates, message: Any) -> Reply:
    data = weight_tensors.safetensors_bytes(message)
    return _result(updates.update_from_tensors(data, **_common(message)))


def _from_group(updates: ModelUpdates, message: Any) -> Reply:
    weight_tensors.check_group_format(message)
    fields = {
        "names": message.names,
        "dtypes": message.dtypes,
        "shapes": message.shapes,
        "group": message.group_name,
    }
    return _result(updates.update_from_group(fields, **_common(message)))


def _join(updates: ModelUpdates, message: Any) -> Reply:
    fields = {
        "address": message.master_address,
        "port": message.master_port,
        "rank_offset": message.rank_offset,
        "world_size": message.world_size,
        "name": message.group_name,
        "backend": message.backend,
    }
    return _result(updates.join_group(fields))


def _leave(updates: ModelUpdates, message: Any) -> Reply:
    return _result(updates.leave_group(message.group_name))


def _read(updates: ModelUpdates, message: Any) -> Reply:
    return {"parameter": updates.read(message.name, message.truncate_size)}


def _check(updates: ModelUpdates, message: Any) -> Reply:
    sums = updates.check(message.action)
    payload = None if sums is None else weight_tensors.checksum_infos(_merged_checksums(sums))
    return {"success": True, "message": "Success.", "payload": payload}


def _release(updates: ModelUpdates, message: Any) -> Reply:
    updates.release(message.tags)
    return {}


def _resume(updates: ModelUpdates, message: Any) -> Reply:
    updates.resume_memory(message.tags)
    return {}


def _merged_checksums(ranks: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """SGLang's ``ChecksumInfo`` of each rank."""
    listed = list(ranks)
    return [
        {
            "checksums": dict(sums),
            "per_gpu_checksum": hashlib.sha256(
                "".join(name + sums[name] for name in sorted(sums)).encode()
            ).hexdigest(),
            "parallelism_info": {
                "tp_rank": number,
                "tp_size": len(listed),
                "dp_rank": 0,
                "dp_size": 1,
                "pp_rank": 0,
                "pp_size": 1,
                "rank": number,
                "size": len(listed),
            },
        }
        for number, sums in enumerate(listed)
    ]
