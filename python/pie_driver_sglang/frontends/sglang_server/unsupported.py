"""Control messages and media that our scheduler does not support, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SENT: Final = "weights are not sent to other servers"
_EXPERTS: Final = "which experts were used is not recorded"
_DUMPS: Final = "tensors are not dumped"
_STORAGE: Final = "the prefix index has no storage after the host"
_CORPUS: Final = "drafts come from the texts of requests alone"
USE_SGLANG: Final = "start the server with `--scheduler sglang`"

#: Reasons by the class of the message.
MESSAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "AddExternalCorpusReqInput": _CORPUS,
        "AttachHiCacheStorageReqInput": _STORAGE,
        "ClearHiCacheReqInput": _STORAGE,
        "DetachHiCacheStorageReqInput": _STORAGE,
        "DumperControlReqInput": _DUMPS,
        "ExpertDistributionReq": _EXPERTS,
        "GetHiCacheL3LayoutReq": _STORAGE,
        "InitWeightsSendGroupForRemoteInstanceReqInput": _SENT,
        "LazyDumpTensorsReqInput": _DUMPS,
        "ListExternalCorporaReqInput": _CORPUS,
        "PdRoleSwitchReqInput": "one scheduler runs prefills and decodes",
        "RemoveExternalCorpusReqInput": _CORPUS,
        "RpcReqInput": "its methods are those of SGLang's scheduler",
        "ScaleElasticEPReqInput": "there are no experts on other hosts",
        "SendWeightsToRemoteInstanceReqInput": _SENT,
        "SetInternalStateReq": "settings do not change while it serves",
        "SlowDownReqInput": "it is as fast as it can be; `/pause_generation` stops it",
        "UpdateWeightsFromIPCReqInput": "weights come from a disk, tensors or a process group",
    }
)
_OTHER: Final = "this scheduler does not know the message"

#: Methods of the tokenizer manager whose replies have no field for an error, or are not shown; some
#: versions lack some of them, and some of the messages.
CALLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "clear_hicache_storage": _STORAGE,
        "dump_expert_distribution_record": _EXPERTS,
        "get_hicache_l3_cache_layout": _STORAGE,
        "set_internal_state": MESSAGES["SetInternalStateReq"],
        "slow_down": MESSAGES["SlowDownReqInput"],
        "start_expert_distribution_record": _EXPERTS,
        "stop_expert_distribution_record": _EXPERTS,
    }
)


def unsupported_media(what: str, why: str = "the driver takes images, no audio or video") -> str:
    """The error for media that are not supported."""
    return f"{what} is not served by this server's scheduler: {why}; remove it, or {USE_SGLANG}"


def unsupported_reason(message: str) -> str:
    """Why a control message is not supported, for the client."""
    return f"not served: {MESSAGES.get(message, _OTHER)}; {USE_SGLANG}"
