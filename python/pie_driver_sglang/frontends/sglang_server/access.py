"""Authentication of SGLang's HTTP server: an access level for every route.

SGLang's own middleware is not used: without keys it leaves control of the server to everyone, and
it protects neither several tokenizer workers nor WebSockets.
"""

from __future__ import annotations

import enum
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config.api_keys import ApiKeys, digest, matches
from pie_driver_sglang.frontends.sglang_server.error_responses import ErrorSender, Send, error_body

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class AccessLevel(enum.Enum):
    """What a client needs to call a route."""

    OPEN = "nothing: health and metrics"
    USER = "the API key, if the server has one"
    CONTROL = "the admin key, else the API key; without keys, a loopback address"
    ADMIN = "the admin key"


_OPEN: Final = ("/health", "/health_generate", "/metrics", "/ping", "/ready")
_USER: Final = (
    "/",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/tags",
    "/classify",
    "/close_session",
    "/detokenize",
    "/docs",
    "/docs/oauth2-redirect",
    "/encode",
    "/generate",
    "/get_load",
    "/get_model_info",
    "/get_server_info",
    "/get_weight_version",
    "/invocations",
    "/is_scaling_elastic_ep",
    "/model_info",
    "/open_session",
    "/openapi.json",
    "/parse_function_call",
    "/redoc",
    "/separate_reasoning",
    "/server_info",
    "/tokenize",
    "/v1/audio/transcriptions",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/detokenize",
    "/v1/decisions",
    "/v1/embeddings",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/loads",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model:path}",
    "/v1/realtime",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v1/tokenize",
    "/vertex_generate",
    "/weight_version",
)
#: They affect other clients, but write no files and run no code.
_CONTROL: Final = (
    "/abort_request",
    "/continue_generation",
    "/flush_cache",
    "/freeze_gc",
    "/get_hicache_l3_cache_layout",
    "/hicache/storage-backend",
    "/list_external_corpora",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_trace_level",
    "/slow_down",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/unload_lora_adapter",
    "/update_weight_version",
    "/weights_checker",
)
#: They access files, replace weights, connect to other hosts, or run a client's code.
_ADMIN: Final = (
    "/add_external_corpus",
    "/begin_weight_update",
    "/clear_hicache_storage_backend",
    "/configure_logging",
    "/destroy_weights_update_group",
    "/dump_expert_distribution_record",
    "/dumper/{method}",
    "/end_weight_update",
    "/get_remote_instance_transfer_engine_info",
    "/get_weights_by_name",
    "/hicache/storage-backend/clear",
    "/init_weights_send_group_for_remote_instance",
    "/init_weights_update_group",
    "/pd_role_switch",
    "/remote_instance_transfer_engine_info",
    "/remove_external_corpus",
    "/scale_elastic_ep",
    "/send_weights_to_remote_instance",
    "/set_internal_state",
    "/start_profile",
    "/stop_profile",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weights_from_tensor",
)
#: Level by the path of a route of any supported SGLang. Unlisted routes are for admins.
ROUTE_LEVELS: Final[Mapping[str, AccessLevel]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("/health", "/health_generate", "/ping", "/ready", "/metrics"), AccessLevel.OPEN
        ),
        **dict.fromkeys(_USER, AccessLevel.USER),
        **dict.fromkeys(_CONTROL, AccessLevel.CONTROL),
        **dict.fromkeys(_ADMIN, AccessLevel.ADMIN),
    }
)
#: Handlers whose paths an operator may choose by environment variables of SGLang.
_NAMED: Final = frozenset(
    {"ollama_chat", "ollama_generate", "ollama_show", "ollama_tags", "vertex_generate"}
)
#: GET needs CONTROL, other methods ADMIN: a backend is a module that is imported.
_READ_ONLY: Final = frozenset({"/hicache/storage-backend"})
#: What SGLang requests besides its warm-up before it is ready; 0.5.17 requests nothing else.
_AFTER_WARM_UP: Final = "/freeze_gc"
_NEEDS_ADMIN: Final = (
    "this route needs the admin key: start the server with PIE_ADMIN_API_KEY or "
    "`--admin-api-key-file`, and send it as a bearer token"
)
_NEEDS_KEY: Final = "send the server's key as `Authorization: Bearer KEY`"
_NEEDS_LOOPBACK: Final = (
    "without keys this route is for clients on the loopback interface, and not for web pages: "
    "start the server with PIE_ADMIN_API_KEY or `--admin-api-key-file`, and send the key as a "
    "bearer token"
)


class AccessKeys(NamedTuple):
    """The digests of a server's keys, and a random key for its own warm-up request."""

    api: bytes | None
    admin: bytes | None
    warm_up: str

    def __repr__(self) -> str:
        """Show which keys are set."""
        return f"AccessKeys(api={self.api is not None}, admin={self.admin is not None})"


def access_keys(keys: ApiKeys) -> AccessKeys:
    """The digests of keys, with a new warm-up key."""
    api, admin = (None if key is None else digest(key) for key in keys)
    return AccessKeys(api, admin, secrets.token_urlsafe(32))


def access_error(
    level: AccessLevel,
    keys: AccessKeys,
    headers: Mapping[bytes, bytes],
    client: str | None,
    route: str = "",
) -> tuple[int, str] | None:
    """The status and message for a request that may not call a route; None if it may.

    Args:
        level: Of the route.
        keys: Of the server.
        headers: By lower-case name.
        client: The client's address; None for a Unix socket.
        route: Its path.
    """
    token = _bearer(headers.get(b"authorization"))
    if level is AccessLevel.OPEN:
        return None
    if level is AccessLevel.ADMIN:
        if keys.admin is None:
            return 403, _NEEDS_ADMIN
        return None if _is_key(token, keys.admin) else (401, _NEEDS_ADMIN)
    wanted = keys.api
    if level is AccessLevel.CONTROL and keys.admin is not None:
        wanted = keys.admin
    if wanted is not None:
        warms_up = level is AccessLevel.USER or route == _AFTER_WARM_UP
        is_warm_up = warms_up and _is_key(token, digest(keys.warm_up))
        return None if is_warm_up or _is_key(token, wanted) else (401, _NEEDS_KEY)
    if level is AccessLevel.CONTROL and (b"origin" in headers or not is_local(client)):
        return 403, _NEEDS_LOOPBACK
    return None


def _bearer(header: bytes | None) -> str | None:
    scheme, _, token = (header or b"").decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _is_key(token: str | None, wanted: bytes) -> bool:
    return token is not None and matches(token, wanted)


def is_local(client: str | None) -> bool:
    """Whether an address is a loopback address; None is a Unix socket."""
    if client is None or client == "localhost":
        return True
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


class AccessMiddleware:
    """ASGI middleware that checks the access level of each route."""

    def __init__(self, app: App, routes: Any, keys: Callable[[], AccessKeys]) -> None:
        """Wrap an application.

        Args:
            app: An ASGI application.
            routes: Its Starlette routes.
            keys: Returns the server's keys, once it has started.
        """
        self._app, self._routes, self._find_keys = app, routes, keys
        self._keys: AccessKeys | None = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if self._keys is None:
            self._keys = self._find_keys()
        headers = dict(scope["headers"])
        client = scope.get("client")
        level = self._level(scope)
        refusal = level and access_error(
            level, self._keys, headers, client and client[0], scope["path"]
        )
        if refusal:
            await _refuse(scope, send, *refusal)
        elif scope["type"] == "http":
            await self._app(scope, receive, ErrorSender(send).send)
        else:
            await self._app(scope, receive, send)

    def _level(self, scope: Scope) -> AccessLevel | None:
        """The level of a request's route; None for no route, or a CORS preflight."""
        path, method = scope["path"], scope.get("method", "GET")
        if method == "OPTIONS":
            return None
        route = path if path in ROUTE_LEVELS else self._route(scope)
        if route is None:
            return None
        if route in _READ_ONLY and method not in ("GET", "HEAD"):
            return AccessLevel.ADMIN
        return ROUTE_LEVELS.get(route, AccessLevel.ADMIN)

    def _route(self, scope: Scope) -> str | None:
        """The path template of a request's route."""
        found = None
        for route in self._routes:
            match, _ = route.matches(scope)
            if match.value and getattr(route, "name", None) in _NAMED:
                return "/generate"
            path = str(getattr(route, "path", None) or scope["path"])
            if match.name == "FULL":
                return path
            if match.value:
                # The path with another method, unless a later route matches fully.
                found = found or path
        return found


def all_paths(routes: Any) -> Iterator[str]:
    """The path templates of routes and of nested routers."""
    for route in routes:
        if (path := getattr(route, "path", None)) is not None:
            yield path
        else:
            yield from all_paths(route.original_router.routes)


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        # Before the handshake, this is answered 403.
        await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
        return
    body = error_body(status, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
