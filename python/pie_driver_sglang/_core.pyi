"""
The native half of the driver: ring, wire format and batch planning.
"""

from _typeshed import SupportsGetItem
from typing import Any, SupportsFloat, SupportsIndex, final
from typing_extensions import Buffer

__all__ = ["AttentionMask", "Batch", "Client", "Copy", "ExitGuard", "Pass", "Planner", "Reply", "Request", "Sampler", "Server", "SlotGroup", "build_info", "encode_forward"]

@final
class AttentionMask:
    """
    Which KV indices each row of a pass may attend to.
    """
    @property
    def offsets(self, /) -> bytearray:
        """
        `[requests]` int64: first word of each request.
        """
    @property
    def words(self, /) -> bytearray:
        """
        `[words]` int32, row by row: bit `i` of a row's word `w` admits KV index `32 w + i`. A row has
        `ceil(KV length after the pass / 32)` words.
        """

@final
class Batch:
    """
    A planned forward request. Stage and run every pass, hand in the tokens of every slot group, then commit. Dropped
    without a commit it is answered by an abort.
    """
    def commit(self, /, *, h2d_us: SupportsIndex = 0, launch_us: SupportsIndex = 0, sync_us: SupportsIndex = 0) -> None:
        """
        Builds the response in the slot and publishes it.

        Args:
            h2d_us: Microseconds of host-to-device copies.
            launch_us: Microseconds of issuing the forward pass and sampling.
            sync_us: Microseconds of waiting for the sampled tokens.
        """
    def fail(self, /) -> None:
        """
        Answers with an abort, after an engine error: the device's block table counts as lost.
        """
    @property
    def parse_ns(self, /) -> int:
        """
        Nanoseconds spent on validating the archive.
        """
    @property
    def plan_ns(self, /) -> int:
        """
        Nanoseconds spent on planning and staging so far.
        """
    def put_outputs(self, /, tokens: Buffer, dist_ids: Buffer | None = None, dist_probs: Buffer | None = None, logits: Buffer | None = None, logprobs: Buffer | None = None, entropies: Buffer | None = None) -> None:
        """
        Takes what the last staged slot group yields: for each class its slots' values one behind the other.

        Args:
            tokens: `[token slots]` int64; one outside the vocabulary empties its request.
            dist_ids: `[listed]` int64: the tokens of each distribution, most probable first.
            dist_probs: `[listed]` float32: their probabilities.
            logits: `[raw slots * vocabulary]` float32.
            logprobs: `[labels]` float32.
            entropies: `[entropy slots]` float32.

        Raises:
            StageError: The group asks for another number of values.
        """
    @property
    def received_ns(self, /) -> int:
        """
        When the request was seen, in nanoseconds of `time.perf_counter_ns`.
        """
    @property
    def requests(self, /) -> int:
        """
        Requests of the frame.
        """
    @property
    def respond_ns(self, /) -> int:
        """
        Nanoseconds spent on building the response; 0 before the commit.
        """
    def stage(self, /) -> Pass | None:
        """
        Writes the next pass into the staging block; None when all are done.
        """
    def stage_slots(self, /) -> SlotGroup | None:
        """
        Writes the next slot group of the current pass into the staging block; None when all are done.
        """
    @property
    def tokens(self, /) -> int:
        """
        Rows that the model computes, drafts included.
        """

@final
class Client:
    """
    Sends requests to a driver as the Pie runtime does. Calls from several threads run on several slots.
    """
    def __new__(cls, /, name: str, *, spin_budget_us: SupportsIndex = 1000, timeout_s: SupportsFloat | SupportsIndex = 60.0) -> Client:
        """
        Opens a driver's region.

        Args:
            name: POSIX name, `/pie_shmem_g<group_id>`.
            spin_budget_us: Microseconds to spin before parking; 0 parks at once, 2**64 - 1 never parks.
            timeout_s: Seconds that a call may take.

        Raises:
            FileNotFoundError: There is no such region.
            RingError: The region is not one that this client understands.
        """
    def abort(self, /) -> None:
        """
        Ends every running and later call with an error.
        """
    def call(self, /, request: bytes) -> bytes:
        """
        Sends raw bytes and returns the raw answer.

        Raises:
            TimeoutError: No answer in time.
            RingError: The request does not fit the slot.
        """
    def copy(self, /, direction: str, sources: SupportsGetItem[int, SupportsIndex], targets: SupportsGetItem[int, SupportsIndex], *, states: bool = False) -> int | None:
        """
        Copies pages and returns the status code.

        Args:
            direction: "D2H", "H2D", "D2D" or "H2H", with D for device pages and H for slots of the host pool.
            sources: Pages to read.
            targets: Pages to write, pair by pair.
            states: They are slots of recurrent state, not pages.
        """
    def forward(self, /, requests: SupportsGetItem[int, Request]) -> Reply:
        """
        Sends a batch and waits for its answer. Errors as `call`.
        """
    def health(self, /) -> int | None:
        """
        Asks whether the driver is alive and returns the status code.
        """

@final
class Copy:
    """
    A copy of whole KV pages within or between the device pool and the host pool, or of recurrent state. Dropped without a commit it is answered
    by an abort.
    """
    def __len__(self, /) -> int:
        """
        Number of pages or slots.
        """
    def commit(self, /, status: SupportsIndex) -> None:
        """
        Answers with a status code: 0 = done, 5 = internal failure.
        """
    @property
    def direction(self, /) -> str:
        """
        The pools of sources and targets: `"D2H"`, `"H2D"`, `"D2D"` or `"H2H"`, with D for device and H for host.
        """
    def groups(self, /) -> list[tuple[list[int], list[int]]]:
        """
        Sources and targets, cut so that copying the parts in order, and each of them at once, gives the result of
        copying pair by pair. Only lists that overlap have more than one part.
        """
    @property
    def states(self, /) -> bool:
        """
        Whether slots of recurrent state are copied, not pages.
        """

@final
class ExitGuard:
    """
    Ends the process with status 0 on SIGTERM and when the parent dies, and removes its regions first, whatever the other
    threads do. One guard per process.
    """
    def __new__(cls, /) -> ExitGuard:
        """
        Handles SIGTERM and watches the parent from now on.

        Raises:
            RingError: The process has a guard already, or the handler cannot be set.
        """
    @staticmethod
    def inert() -> ExitGuard:
        """
        A guard that handles nothing, for a host with its own signal handling.
        """

@final
class Pass:
    """
    One staged forward pass.
    """
    @property
    def decode(self, /) -> bool:
        """
        Whether every request has exactly one row, which sees all KV up to itself.
        """
    @property
    def mask(self, /) -> AttentionMask | None:
        """
        What the rows may attend to; None when each sees all KV up to itself.
        """
    @property
    def requests(self, /) -> int:
        """
        Requests.
        """
    @property
    def seq_lens_sum(self, /) -> int:
        """
        Sum of the KV lengths after the pass.
        """
    @property
    def slots(self, /) -> int:
        """
        Sampling slots of the pass, over all its groups.
        """
    @property
    def states(self, /) -> bytearray | None:
        """
        `[requests, 2]` int64: slot of the state pool, 0 for the padding slot, and 1 where it starts from zeros; None for a
        model without recurrent state.
        """
    @property
    def tokens(self, /) -> int:
        """
        Rows.
        """
    @property
    def updates(self, /) -> int:
        """
        Changed block-table entries.
        """

@final
class Planner:
    """
    Turns frames into passes over a staging block. Give it to `Server.serve`.
    """
    def __new__(cls, /, *, page_size: SupportsIndex, total_pages: SupportsIndex, vocab_size: SupportsIndex, max_positions: SupportsIndex, row_pages: SupportsIndex, max_requests: SupportsIndex, chunk_tokens: SupportsIndex, max_slots: SupportsIndex, random_seed: SupportsIndex, states: SupportsIndex = 0, masks: bool = True) -> Planner:
        """
        A planner for a model and its KV pool.

        Args:
            page_size: Tokens of a KV page.
            total_pages: Pages that the runtime may name.
            vocab_size: Rows of the embedding table.
            max_positions: Rows of the position table.
            row_pages: Pages of one block-table row.
            max_requests: Requests of one pass.
            chunk_tokens: Tokens of one pass.
            max_slots: Logit rows computed at once.
            random_seed: Key of the randomness of unseeded samplers.
            states: Slots of the engine's pool of recurrent state that the runtime may name; 0 for none.
            masks: The engine applies attention masks; otherwise requests whose mask is not causal are emptied.

        Raises:
            ValueError: A limit is 0, or the pool has more storage slots than a 31-bit index names.
        """
    @property
    def block_bytes(self, /) -> int:
        """
        Size of the staging block in bytes.
        """
    @property
    def layout(self, /) -> list[tuple[str, tuple[str, int, int]]]:
        """
        The arrays of the staging block: name to (dtype, byte offset, capacity in elements), in the order in which they lie.
        """

@final
class Reply:
    """
    A driver's answer.
    """
    @property
    def aborted(self, /) -> bool:
        """
        Whether the driver gave the request up.
        """
    @property
    def dists(self, /) -> list[list[tuple[list[int], list[float]]]]:
        """
        Distributions of each request: token ids and probabilities.
        """
    @property
    def entropies(self, /) -> list[list[float]]:
        """
        Entropies of each request.
        """
    @property
    def fast(self, /) -> bool:
        """
        Whether the fast token reply was used.
        """
    @property
    def logits(self, /) -> list[list[list[float]]]:
        """
        Logit rows of each request.
        """
    @property
    def logprobs(self, /) -> list[list[list[float]]]:
        """
        Log-probability entries of each request.
        """
    @property
    def probes(self, /) -> tuple[int, int, int, int, int, int]:
        """
        Driver-side microseconds: parse, plan, host-to-device, launch, sync, response.
        """
    @property
    def status(self, /) -> int | None:
        """
        The status code of a status answer, else None.
        """
    @property
    def tokens(self, /) -> list[list[int]]:
        """
        Tokens of each request.
        """

@final
class Request:
    """
    One request of a forward frame. KV geometry follows from `pages`, `last_page_len`, `tokens` and `drafts` as the Pie
    driver protocol defines it.
    """
    def __new__(cls, /, tokens: SupportsGetItem[int, SupportsIndex], positions: SupportsGetItem[int, SupportsIndex], pages: SupportsGetItem[int, SupportsIndex], last_page_len: SupportsIndex, samplers: SupportsGetItem[int, tuple[SupportsIndex, Sampler]] = ..., *, context_id: SupportsIndex = 0, masks: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]] | None = None, logit_mask: SupportsGetItem[int, SupportsIndex] | None = None, drafts: SupportsGetItem[int, SupportsIndex] = ..., draft_positions: SupportsGetItem[int, SupportsIndex] = ..., adapter_id: SupportsIndex = ..., state_slot: SupportsIndex | None = None, state_reset: bool = False) -> Request:
        """
        Describes one request.

        Args:
            tokens: Input token ids.
            positions: One position per token.
            pages: Page ids in KV order.
            last_page_len: Tokens in the last page after the inputs.
            samplers: (row, sampler) pairs; rows count from the request's first token.
            context_id: The runtime's id of the context, 0 = none.
            masks: One run-length row per token, None = causal.
            logit_mask: Run lengths over the vocabulary, None = no constraint.
            drafts: Draft tokens to verify.
            draft_positions: One position per draft, empty = consecutive.
            adapter_id: -1 = none.
            state_slot: Slot of recurrent state, None = none. All requests of a batch have one, or none has.
            state_reset: The slot starts from zeros.
        """

@final
class Sampler:
    """
    What to compute from one row's logits. Make one with the static methods.
    """
    @staticmethod
    def dist(temperature: SupportsFloat | SupportsIndex, num_tokens: SupportsIndex) -> Sampler:
        """
        The num_tokens most probable tokens with their probabilities.
        """
    @staticmethod
    def embedding() -> Sampler:
        """
        Reserved by the protocol: no output.
        """
    @staticmethod
    def entropy() -> Sampler:
        """
        The entropy of the distribution.
        """
    @staticmethod
    def greedy() -> Sampler:
        """
        The arg-max, as the SDKs ask for it.
        """
    @staticmethod
    def logprob(token_id: SupportsIndex) -> Sampler:
        """
        The log-probability of one token.
        """
    @staticmethod
    def logprobs(token_ids: SupportsGetItem[int, SupportsIndex]) -> Sampler:
        """
        The log-probabilities of some tokens, in their order.
        """
    @staticmethod
    def min_p(temperature: SupportsFloat | SupportsIndex, p: SupportsFloat | SupportsIndex) -> Sampler:
        """
        Samples among tokens at least p times as probable as the best.
        """
    @staticmethod
    def multinomial(temperature: SupportsFloat | SupportsIndex, seed: SupportsIndex = 0) -> Sampler:
        """
        Samples the whole distribution; seeds 0 and 1 ask for fresh randomness.
        """
    @staticmethod
    def raw_logits() -> Sampler:
        """
        All logits of the row.
        """
    @staticmethod
    def top_k(temperature: SupportsFloat | SupportsIndex, k: SupportsIndex) -> Sampler:
        """
        Samples among the k most probable tokens; 0 keeps all.
        """
    @staticmethod
    def top_k_top_p(temperature: SupportsFloat | SupportsIndex, k: SupportsIndex, p: SupportsFloat | SupportsIndex) -> Sampler:
        """
        Top-k, then top-p on the renormalised rest.
        """
    @staticmethod
    def top_p(temperature: SupportsFloat | SupportsIndex, p: SupportsFloat | SupportsIndex) -> Sampler:
        """
        Samples within the smallest set of tokens of mass p.
        """

@final
class Server:
    """
    Owns the shared-memory region and iterates over the work that needs Python: `Batch` and `Copy` objects. Everything
    else (malformed frames, health checks, frames without tokens, unsupported operations) is answered without it.
    """
    def __iter__(self, /) -> Server: ...
    def __new__(cls, /, name: str, guard: ExitGuard, *, spin_budget_us: SupportsIndex, takeover_s: SupportsFloat | SupportsIndex = 5.0, min_request_bytes: SupportsIndex = 0) -> Server:
        """
        Creates the region `name`, waiting up to `takeover_s` seconds for a live owner to leave.

        Args:
            name: POSIX name, `/pie_shmem_g<group_id>`.
            guard: Removes the region when the process must end.
            spin_budget_us: Microseconds to spin before parking; 0 parks at once, 2**64 - 1 never parks.
            takeover_s: Seconds to wait for a live owner.
            min_request_bytes: Size of the largest request to expect; enlarges the region where it must.

        Raises:
            RingError: Another driver owns the name, or the memory cannot be had.
        """
    def __next__(self, /) -> Batch | Copy:
        """
        Waits for the next batch or copy, without the GIL; ends when the server was stopped.
        """
    @property
    def name(self, /) -> str:
        """
        Name of the region.
        """
    def rehearse(self, /, frame: bytes) -> Batch:
        """
        Plans a request frame of the caller's own, for warm-up: its answer goes nowhere.

        Raises:
            RuntimeError: `serve` was not called, or a batch is open.
            WireError: The bytes are no forward frame, or its arrays contradict each other.
        """
    @property
    def request_capacity(self, /) -> int:
        """
        Bytes that one request may have.
        """
    @property
    def response_capacity(self, /) -> int:
        """
        Bytes that one response may have.
        """
    def serve(self, /, planner: Planner, block: Buffer, report: Any, *, host_pages: SupportsIndex = 0) -> None:
        """
        Takes the planner and the staging block; iterate over the server afterwards.

        Args:
            planner: It cannot be used by anyone else from now on.
            block: Writable bytes, at least `planner.block_bytes` of them. The engine must not write to them.
            report: Called as `report(kind, text)` for what deserves a log line.
            host_pages: Size of the engine's host pool; 0 for none.

        Raises:
            ValueError: The block is too small or not writable, or the planner was given away before.
            RuntimeError: The server serves already.
        """
    def stop(self, /) -> None:
        """
        Ends the iteration; may be called from any thread.
        """
    def unlink(self, /) -> None:
        """
        Ends the iteration and removes the region's name. The mapping lives on as long as the server.
        """

@final
class SlotGroup:
    """
    Staged slots, class by class in the order of the attributes.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, greedy: SupportsIndex = 0, plain: SupportsIndex = 0, filtered: SupportsIndex = 0, dists: SupportsIndex = 0, logits: SupportsIndex = 0, logprobs: SupportsIndex = 0, entropies: SupportsIndex = 0) -> SlotGroup:
        """
        A group of the given sizes; the planner makes them, tests may.
        """
    @property
    def dists(self, /) -> int:
        """
        Slots that return the most probable tokens.
        """
    @property
    def entropies(self, /) -> int:
        """
        Slots that return their entropy.
        """
    @property
    def filtered(self, /) -> int:
        """
        Slots with top-k, top-p or min-p.
        """
    @property
    def greedy(self, /) -> int:
        """
        Arg-max slots.
        """
    @property
    def labels(self, /) -> bytes:
        """
        Of each log-probability that is asked for: the slot, counted from the first log-probability slot, and the token;
        `[labels, 2]` int64.
        """
    @property
    def logits(self, /) -> int:
        """
        Slots that return their logits.
        """
    @property
    def logprobs(self, /) -> int:
        """
        Slots that return log-probabilities.
        """
    @property
    def masks(self, /) -> int:
        """
        Staged logit masks.
        """
    @property
    def plain(self, /) -> int:
        """
        Slots that sample the whole distribution.
        """

def build_info() -> dict[str, str]:
    """
    Facts about this build for bug reports: `version`, `profile` and `target`.
    """

def encode_forward(requests: SupportsGetItem[int, Request], driver_id: SupportsIndex = 0) -> bytes:
    """
    Encodes a forward frame as the runtime does.

    Args:
        requests: The batch, in order.
        driver_id: Echoed by the response.
    """
