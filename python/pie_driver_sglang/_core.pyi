"""
The native half of the driver: ring, wire format and batch planning.
"""

from _typeshed import SupportsGetItem
from numpy import ndarray
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final
from typing_extensions import Buffer

__all__ = ["MAX_SAMPLES", "STEP_EXTRA_WORDS", "STEP_LOGPROB_WORDS", "STEP_TOP", "WARM_UP_ADAPTER", "AttentionMask", "Batch", "Broadcast", "CacheEvent", "Client", "Copy", "Counts", "Drafter", "Evicted", "ExitGuard", "Extension", "Follower", "Gateway", "GraphPath", "Image", "ImageSpan", "Inserted", "LayerPatterns", "Load", "Match", "NodeInfo", "Output", "PagePool", "Pass", "PassImages", "Planner", "PoolStats", "RadixIndex", "Reply", "Request", "Requests", "Runtime", "Sampler", "Server", "SglangFrontend", "SlotGroup", "Step", "TracedRequest", "Wake", "build_info", "check_request_limits", "die_with_parent", "encode_forward", "graph_layout", "region_bytes", "run_grammar_compiler"]

MAX_SAMPLES: Final = 1024
"""
Most sequences (`n`) of one request to SGLang's server, which makes a request of each.
"""

STEP_EXTRA_WORDS: Final[int]
"""
Words outside of the block of a step that its extension may take.
"""

STEP_LOGPROB_WORDS: Final[int]
"""
Words of log-probabilities that an extended graph writes at most.
"""

STEP_TOP: Final[int]
"""
Most probable tokens that such a graph finds for a slot.
"""

WARM_UP_ADAPTER: Final[int]
"""
The adapter that a warm-up may bind without loading one.
"""

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
    def drop_adapter(self, /, adapter_id: SupportsIndex, reason: str) -> None:
        """
        Empties the requests that the next passes bind to an adapter that cannot be had.

        Args:
            adapter_id: One that the next pass needs.
            reason: What happened and what to do, for the log.

        Raises:
            StageError: The pass before is not done.
        """
    def fail(self, /) -> None:
        """
        Answers with an abort, after an engine error: the device's block table counts as lost.
        """
    def fail_slot(self, /, slot: SupportsIndex, reason: str) -> None:
        """
        Says why the logit processor of a slot of the last staged group failed. Hand in a token outside the vocabulary for it: its
        request alone is then rejected, with this reason.
        """
    def next_adapters(self, /) -> list[int]:
        """
        The different adapters that the next pass needs.
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
    def prepare_drafts(self, /) -> None:
        """
        Does what can be done for drafts before tokens are known; call it while the device computes.
        """
    def put_outputs(self, /, tokens: Buffer, dist_ids: Buffer | None = None, dist_probs: Buffer | None = None, logits: Buffer | None = None, logprobs: Buffer | None = None, entropies: Buffer | None = None, logprob_words: Buffer | None = None) -> None:
        """
        Takes what the last staged slot group yields: for each class its slots' values one after the other.

        Args:
            tokens: `[token slots]` int64; one outside the vocabulary rejects its request.
            dist_ids: `[listed]` int64: the tokens of each distribution, most probable first.
            dist_probs: `[listed]` float32: their probabilities.
            logits: `[raw slots * vocabulary]` float32.
            logprobs: `[labels]` float32.
            entropies: `[entropy slots]` float32.
            logprob_words: `[words]` int32: of each position the log-probability of its token, the most probable tokens, best first,
                their log-probabilities, those of tokens that are given for it; floats as their bits.

        Raises:
            StageError: The group asks for another number of values, or there is none.
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

        Raises:
            StageError: The pass before has slots without outputs.
        """
    def stage_slots(self, /) -> SlotGroup | None:
        """
        Writes the next slot group of the current pass into the staging block; None when all are done.

        Raises:
            StageError: The group before has no outputs.
        """
    @property
    def tokens(self, /) -> int:
        """
        Rows that the model computes, drafts included.
        """

@final
class Broadcast:
    """
    Sends the other ranks of a model what this one is about to do, in shared memory without a name.
    """
    def __new__(cls, /, followers: SupportsIndex) -> Broadcast:
        """
        A broadcast to `followers` others.

        Raises:
            RingError: The memory cannot be had.
        """
    @property
    def fd(self, /) -> int:
        """
        The descriptor that the followers' processes must inherit.
        """
    def send(self, /, parts: SupportsGetItem[int, Buffer]) -> None:
        """
        Hands a command to the followers, in the order of everything else that is sent.

        Args:
            parts: Contiguous buffers, which a follower gets as one. They are copied straight into the memory that it reads, and must
                not be written to meanwhile.

        Raises:
            RingError: A follower has spoilt the memory.
            ValueError: A buffer is not contiguous.
        """
    def send_block(self, /, block: Buffer, end: SupportsIndex) -> None:
        """
        Hands the first `end` bytes of the staging block to the followers.

        Raises:
            RingError: A follower has spoilt the memory.
            ValueError: The block is shorter.
        """

@final
class CacheEvent:
    """
    A KV event in SGLang's terms: a block is a page.
    """
    @property
    def bigram(self, /) -> bool:
        """
        Whether keys are pairs of neighbouring tokens.
        """
    @property
    def block_size(self, /) -> int:
        """
        Tokens (or pairs) per block.
        """
    @property
    def hashes(self, /) -> list[int]:
        """
        Hashes of the blocks, 64-bit; of stored blocks each is the parent of the next one.
        """
    @property
    def kind(self, /) -> str:
        """
        `stored`, `removed` or `cleared`.
        """
    @property
    def medium(self, /) -> str:
        """
        Tier: `GPU` or `CPU_PINNED`; empty for `cleared`.
        """
    @property
    def namespace(self, /) -> str | None:
        """
        The namespace of the stored sequence.
        """
    @property
    def parent(self, /) -> int | None:
        """
        Hash of the first block's parent.
        """
    @property
    def tokens(self, /) -> list[int]:
        """
        Tokens of all stored blocks; with pairs one more.
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
    def adapter(self, /, operation: str, adapter_id: SupportsIndex, path: str = "") -> int | None:
        """
        Sends an adapter operation and returns the status code.

        Args:
            operation: "Load", "Save", "ZoInit", "ZoUpdate" or "GenerateAudio".
            adapter_id: The id that requests bind.
            path: What the operation asks for, of a load where the adapter lies.
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
class Counts:
    """
    What a server has served, as it was when it was read; or what came between two readings.
    """
    @property
    def abandoned(self, /) -> int:
        """
        Answers that came after the client had given up.
        """
    @property
    def aborted_batches(self, /) -> int:
        """
        Batches that failed and were answered by an abort.
        """
    @property
    def accepted_drafts(self, /) -> int:
        """
        Of these, drafts that were accepted.
        """
    def below(self, /, name: str) -> list[tuple[float, int]]:
        """
        How many times are below each of some bounds, which double; names as for `quantile_us`.

        Returns:
            Of each bound its seconds and the count; the last bound is infinite.

        Raises:
            ValueError: No times have this name.
        """
    @property
    def computed_tokens(self, /) -> int:
        """
        Rows that the model computed, drafts included.
        """
    @property
    def copied_pages(self, /) -> dict:
        """
        Pages copied, by direction: `"D2H"`, `"H2D"`, `"D2D"` and `"H2H"`.
        """
    @property
    def copied_states(self, /) -> int:
        """
        Slots of recurrent state that were copied.
        """
    @property
    def drafts(self, /) -> int:
        """
        Drafts that were verified.
        """
    @property
    def generated_tokens(self, /) -> int:
        """
        Tokens that were returned, accepted drafts included.
        """
    @property
    def graph_steps(self, /) -> int:
        """
        Batches that the graph path ran.
        """
    @property
    def last_requests(self, /) -> int:
        """
        Requests of the last batch.
        """
    @property
    def prompt_tokens(self, /) -> int:
        """
        Of these, input tokens of requests with more than one: prompts, not decodes.
        """
    @property
    def python_steps(self, /) -> int:
        """
        Batches that the Python path ran.
        """
    def quantile_us(self, /, name: str, share: SupportsFloat | SupportsIndex) -> float | None:
        """
        The time that a share of the batches does not exceed, to a sixteenth.

        Args:
            name: `"host"` for what the host takes while the device has nothing to do; `"step"` for the time from a
                request's arrival to its answer.
            share: 0.5 for the median, 0.99 for the 99th percentile.

        Returns:
            Microseconds; None without batches.

        Raises:
            ValueError: No times have this name.
        """
    @property
    def refused(self, /) -> dict:
        """
        Requests of batches, and frames, that were refused, by reason.
        """
    @property
    def requests(self, /) -> int:
        """
        Requests of all batches.
        """
    def since(self, /, earlier: Counts) -> Counts:
        """
        What came after `earlier` was read: `last_requests` and `used_pages` are as in this one.
        """
    @property
    def steps(self, /) -> int:
        """
        Batches that needed the model.
        """
    def sum_s(self, /, name: str) -> float:
        """
        Sum of the times, in seconds; names as for `quantile_us`.

        Raises:
            ValueError: No times have this name.
        """
    @property
    def used_pages(self, /) -> int:
        """
        Different pages that the requests of one recent batch name: the first after the reading before this one.
        """

@final
class Drafter:
    """
    N-gram drafter: indexes the tokens of sequences (contexts), and proposes draft trees of one size for each.
    """
    def __new__(cls, /, *, nodes: SupportsIndex, max_depth: SupportsIndex, capacity: SupportsIndex, context_bytes: SupportsIndex, branches: bool) -> Drafter:
        """
        Creates a drafter with an empty index.

        Args:
            nodes: Nodes per tree, the context's last token included: `nodes - 1` drafts.
            max_depth: Longest match, in tokens.
            capacity: Tokens of the history that all contexts share, at most 64 bytes each.
            context_bytes: Memory limit of the contexts' own text, in bytes; beyond it the least recently used context
                is released.
            branches: Whether trees may branch; otherwise each is a chain.

        Raises:
            ValueError: A limit is out of range.
        """
    def append(self, /, context: SupportsIndex, position: SupportsIndex, tokens: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Appends tokens to a context without drafting.

        Args:
            context: Id of the context, not 0.
            position: Position of the first of these tokens in the context.
            tokens: Token ids, at least one.

        Raises:
            ValueError: The id is 0, or there are no tokens.
        """
    def draft(self, /, contexts: SupportsGetItem[int, SupportsIndex], positions: SupportsGetItem[int, SupportsIndex], tokens: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]) -> tuple[bytearray, bytearray]:
        """
        Appends tokens to contexts, and drafts after each.

        Args:
            contexts: Ids of the contexts, none of them 0.
            positions: Position of the first of these tokens in each context. Tokens that are already known from there
                on are compared, and replaced from the first difference; after a gap the context starts again.
            tokens: Token ids for each context, at least one.

        Returns:
            Two buffers in native byte order, for `n` contexts: the tokens, int64 `(n, nodes)`, where node 0 is the
            context's last token and missing nodes are token 0; and the tree mask, bytes `(n, nodes, nodes)`: 1 in row
            `i` and column `j` if node `j` is node `i` or an ancestor of it.

        Raises:
            ValueError: The lists differ in length, an id is 0, or a context has no tokens.
        """
    def release(self, /, context: SupportsIndex) -> None:
        """
        Releases a context. Its text stays in the shared history.
        """

@final
class Evicted:
    """
    Result of an eviction. The caller makes the copies, in order, before it writes to any of the pages.
    """
    def __repr__(self, /) -> str: ...
    @property
    def device(self, /) -> ndarray:
        """
        Evicted device page ids, int32, those in `moves` included.
        """
    @property
    def host(self, /) -> ndarray:
        """
        Host page ids that are free now, int32.
        """
    @property
    def moves(self, /) -> ndarray:
        """
        Copies to make, int32 `(n, 2)`: from a device page to a host page.
        """

@final
class ExitGuard:
    """
    Ends the process with status 0 on SIGTERM and when the parent dies, and removes its regions first, whatever the other
    threads do. A line on stderr says why, unless stderr cannot take it at once. The regions of a process that is killed are
    removed by another process, which is forked off here. One guard per process.
    """
    def __new__(cls, /) -> ExitGuard:
        """
        Handles SIGTERM and watches the parent from now on.

        Raises:
            RingError: The process has a guard already, or the handler cannot be set.
        """
    def exit(self, /, status: SupportsIndex) -> None:
        """
        Removes the regions and ends the process at once, from any thread and whatever the others do.
        """
    @staticmethod
    def inert() -> ExitGuard:
        """
        A guard that handles nothing, for a host with its own signal handling.
        """
    def set_last_line(self, /, form: str) -> None:
        """
        Changes the line that says why the process ends.

        Args:
            form: The line, with `{text}` for the reason, and `{time}` (`YYYY-MM-DD HH:MM:SS.mmm`) or `{iso}` (as in ISO 8601)
                for the local time.
        """

@final
class Extension:
    """
    What one request asks for beyond the Pie protocol; `docs/wire-extension.md` has the bytes.
    """
    def __new__(cls, /, *, temperature: SupportsFloat | SupportsIndex | None = None, top_k: SupportsIndex = 0, top_p: SupportsFloat | SupportsIndex = 1.0, min_p: SupportsFloat | SupportsIndex = 0.0, seed: SupportsIndex | None = None, frequency_penalty: SupportsFloat | SupportsIndex = 0.0, presence_penalty: SupportsFloat | SupportsIndex = 0.0, repetition_penalty: SupportsFloat | SupportsIndex = 1.0, counted_from: SupportsIndex = 0, history: SupportsGetItem[int, SupportsIndex] = ..., logit_bias: SupportsGetItem[int, tuple[SupportsIndex, SupportsFloat | SupportsIndex]] = ..., suppressed: SupportsGetItem[int, SupportsIndex] = ..., suppressed_until: SupportsIndex = 0, mask: SupportsGetItem[int, SupportsIndex] = ..., shares_mask: bool = False, logprobs: SupportsIndex | None = None, logprobs_scaled: bool = False, logprobs_of: SupportsGetItem[int, SupportsIndex] = ..., prompt_logprobs: tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None = None, processor: SupportsGetItem[int, SupportsIndex] = ..., hidden_states: SupportsIndex = 0) -> Extension:
        """
        Describes it. What is left out changes nothing.

        Args:
            temperature: In place of the parameters of its samplers of tokens, with those up to `seed`; 0 for the arg-max, None
                to keep its samplers.
            top_k: Tokens kept; 0 for all.
            top_p: Mass kept, of the whole distribution.
            min_p: Share of the largest probability that a token must have.
            seed: With the position it fixes what is sampled.
            frequency_penalty: Taken from a token's logit for each time that it counts.
            presence_penalty: Taken from the logit of a token that counts.
            repetition_penalty: Divides the logit of a token that counts, or multiplies it if it is below 0.
            counted_from: KV index of the first token that counts.
            history: Tokens that count and lie right before the input, whose KV is there already.
            logit_bias: Tokens, and what is added to their logits.
            suppressed: Tokens that must not be sampled before `suppressed_until`.
            suppressed_until: KV index of the first position for which they may.
            mask: Bit `i` of word `w` allows token `32 w + i`; empty for all.
            shares_mask: The mask is that of the nearest request before in the frame that has one; `mask` is empty.
            logprobs: Most probable tokens whose log-probabilities are wanted besides that of each sampled token; None for no
                log-probabilities at all.
            logprobs_scaled: After the temperature.
            logprobs_of: Tokens whose log-probabilities are wanted.
            prompt_logprobs: KV indices of the first token of the prompt whose log-probabilities are wanted and after the last
                one, and the token after the input, if that is one of them.
            processor: A logit processor of the driver's process; `history` is then all tokens before the input.
            hidden_states: With log-probabilities, the numbers of a hidden state, which each position has after them; 0 for none.
        """

@final
class Follower:
    """
    A rank's end of a `Broadcast`: iterates over the commands, and does in between what needs no Python. It keeps the staging
    block as the leader's is, and runs the leader's steps on its own graph path.
    """
    def __iter__(self, /) -> Follower: ...
    def __new__(cls, /, fd: SupportsIndex, index: SupportsIndex, block: Buffer, *, spin_budget_us: SupportsIndex, graph_path: GraphPath | None = None) -> Follower:
        """
        Follower number `index`, from 0.

        Args:
            fd: `Broadcast.fd`, inherited; the follower takes it.
            index: Which follower this is; each can be taken once.
            block: This rank's staging block: writable bytes that only the engine reads.
            spin_budget_us: As `Server`.
            graph_path: Runs the leader's steps.

        Raises:
            RingError: The descriptor is not of a broadcast, or the follower is taken.
            ValueError: The block is not writable, or the graph path already serves.
        """
    def __next__(self, /) -> bytes:
        """
        Waits for the next command, without the GIL. It does not end by itself.
        """

@final
class Gateway:
    """
    The gRPC services that the gateway smg calls, for a runtime whose drivers are ready: one thread without Python serves them.

    Nothing else may call `poll` of the runtime. Use it as a context manager, or call `close`, before the runtime is shut down.
    """
    def __enter__(self, /) -> Gateway: ...
    def __exit__(self, /, _kind: Any | None = None, _error: Any | None = None, _traceback: Any | None = None) -> None: ...
    def __new__(cls, /, runtime: Runtime, *, contract: str = "vllm", host: str = "127.0.0.1", port: SupportsIndex = 0, model_path: str = ..., tokenizer_path: str = ..., served_model_name: str = ..., model_type: str = ..., architectures: SupportsGetItem[int, str] = ..., eos_token_ids: SupportsGetItem[int, SupportsIndex] = ..., bos_token_id: SupportsIndex | None = None, pad_token_id: SupportsIndex | None = None, context_length: SupportsIndex | None = None, default_sampling: str = ..., weight_version: str = ..., version: str = ..., max_running_requests: SupportsIndex | None = None, image_merge: SupportsIndex | None = None, speculate: bool = False, event_history: SupportsIndex = 10000, traces: bool = False) -> Gateway:
        """
        Starts the server.

        Args:
            runtime: What computes.
            contract: `vllm` for `vllm.grpc.engine.VllmEngine`, `sglang` for `sglang.grpc.scheduler.SglangScheduler`.
            host: An address of this machine.
            port: 0 for any that is free.
            model_path: The folder, which a gateway on this machine reads tokenizer and template from.
            tokenizer_path: The folder of the tokenizer, if it is another one.
            served_model_name: What clients call the model.
            model_type: As `config.json` says it.
            architectures: As `config.json` says them.
            eos_token_ids: They end a request, unless it ignores them.
            bos_token_id: Begins texts.
            pad_token_id: Fills batches.
            context_length: Most tokens of prompt and output together; the driver may allow fewer.
            default_sampling: Sampling parameters for what a client leaves out, as a JSON object.
            weight_version: Names the weights.
            version: Of this program.
            max_running_requests: As the runtime has it.
            image_merge: Patches along a side of the square that makes a token of an image; None for a model without images. The
                runtime must have room for them (`max_image_bytes`).
            speculate: The driver may draft for requests.
            event_history: Batches of changes of the prefix index that are kept; 0 to publish none. The runtime must record them
                (`kv_events`).
            traces: Keep for `take_traced` what happens to requests: to those whose call has no `traceparent`, or one of a trace that is
                recorded.

        Raises:
            OSError: The address cannot be listened at.
            RuntimeError: The drivers are not ready.
            ValueError: The contract or the host is none.
        """
    @property
    def address(self, /) -> str:
        """
        Where it listens, as `host:port`.
        """
    def close(self, /, timeout_s: SupportsFloat | SupportsIndex = 0.0) -> None:
        """
        Takes no more requests, lets those that run end, but no longer than `timeout_s`, and closes every connection. A second
        call does nothing.
        """
    @property
    def open_requests(self, /) -> int:
        """
        Requests that have not ended.
        """
    def take_traced(self, /) -> tuple[list[TracedRequest], int]:
        """
        What happened when to requests that were traced and have ended since the last call; and how many more there were than are
        kept, which is 4,096. Nothing without `traces`.
        """

@final
class GraphPath:
    """
    Captured graphs, and the memory that they share with the host. Give it to `Server.serve`.
    """
    @staticmethod
    def call(block: Buffer, mask_words: Buffer, results: Buffer, logprobs: Buffer, rows: SupportsGetItem[int, SupportsIndex], slots: SupportsIndex, most: SupportsIndex, run: Any, grouped: SupportsGetItem[int, SupportsIndex] = ..., extended: SupportsGetItem[int, SupportsIndex] = ..., adapters: SupportsGetItem[int, SupportsIndex] = ..., extended_adapters: SupportsGetItem[int, SupportsIndex] = ..., drafting: SupportsGetItem[int, SupportsIndex] = ..., extended_drafting: SupportsGetItem[int, SupportsIndex] = ..., drafts: Buffer | None = None, num_drafts: SupportsIndex = 0) -> GraphPath:
        """
        Calls of a Python function in place of graphs, for a device that has none.

        Args:
            block, mask_words, results, logprobs: As for `cuda`.
            rows: Rows of each graph, fewest first.
            slots, most: As for `cuda`.
            run: Called as `run(graph)` with its number; the results are there when it returns.
            grouped, extended, adapters, extended_adapters, drafting, extended_drafting: Rows of further graphs, as for `cuda`.
            drafts, num_drafts: As for `cuda`.

        Raises:
            ValueError: As for `cuda`.
        """
    @staticmethod
    def cuda(block: Buffer, mask_words: Buffer, results: Buffer, logprobs: Buffer, graphs: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]], slots: SupportsIndex, stream: SupportsIndex, most: SupportsIndex, owner: Any, grouped: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., extended: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., adapters: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., extended_adapters: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., drafting: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., extended_drafting: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] = ..., drafts: Buffer | None = None, num_drafts: SupportsIndex = 0) -> GraphPath:
        """
        CUDA graphs, launched by their raw handles on the current device.

        Args:
            block: Writable bytes that graphs read, laid out as `graph_layout(rows, slots)`; large enough for every graph.
            mask_words: `[slots * ceil(vocabulary / 32) + 2 * row_pages]` int32 that graphs read, with extended graphs
                `STEP_EXTRA_WORDS` more: block-table changes for which the block has no room, logit masks, tokens to note, biases.
            results: `[slots]` uint64 that graphs write: for each slot `step << 32 | token`, at once.
            logprobs: `[words]` int32 that extended graphs write before the results: log-probabilities. Without such graphs it may
                be empty, else it has `STEP_LOGPROB_WORDS`.
            graphs: Rows and `cudaGraphExec_t` of each graph, fewest rows first.
            slots: Most slots of a graph; it has as many as rows, if these are fewer.
            stream: The `cudaStream_t` that they run on.
            most: Most rows of one request.
            owner: Owns graphs, stream and memory, and is kept alive with the graph path. Nothing else may use them.
            grouped: Rows and handle of each graph whose block is `graph_layout(rows, slots, grouped=True)`, fewest first; they
                run the steps in which rows read the same KV first, if they have room.
            extended: Rows and handle of each graph whose block is `graph_layout(rows, slots, extended=True)`, fewest first; they
                run the steps whose extension changes logits.
            adapters: Rows and handle of each graph whose block is `graph_layout(rows, slots, adapters=True)`, fewest first; they
                run the steps with LoRA adapters.
            extended_adapters: The same with `extended=True`, for steps with both.
            drafting: Rows and handle of each graph that runs a draft model, whose block is that of `graphs`, fewest first; they
                run the steps whose drafts the planner wants.
            extended_drafting: The same with `extended=True`.
            drafts: `[slots, num_drafts]` int32 that these two write before the results: the drafts of the model after each
                slot's token, -1 for none. None without a draft model.
            num_drafts: Drafts of a slot.

        Raises:
            RuntimeError: There is no CUDA driver, or no context on this thread.
            ValueError: A buffer is too small, or a graph of `grouped` has more rows than slots.
        """
    def lead(self, /, broadcast: Broadcast) -> None:
        """
        Sends every step to the other ranks of a model, so that their graph paths run it, too.

        Raises:
            ValueError: The graph path already serves.
        """

@final
class Image:
    """
    An image of a request.
    """
    def __new__(cls, /, row: SupportsIndex, grid: tuple[SupportsIndex, SupportsIndex, SupportsIndex], pixels: bytes, positions: SupportsGetItem[int, SupportsIndex] = ..., *, anchor: SupportsIndex | None = None, patch_positions: SupportsGetItem[int, SupportsIndex] = ...) -> Image:
        """
        Describes an image; its rows of the request have token 0.

        Args:
            row: Its first row, counted from the request's first token.
            grid: Patches in time, height and width.
            pixels: float32 `[patches, values of a patch]`, little-endian.
            positions: Rotary positions (time, height, width) of each row, one after the other; empty = as for text.
            anchor: Position of the first row; None = as the request says.
            patch_positions: x and y of each patch, for models that need them.
        """

@final
class ImageSpan:
    """
    An image with rows in a pass. Its buffer is the pixels: float32 `[patches, values of a patch]`, little-endian, at any
    address.
    """
    @property
    def continues(self, /) -> bool:
        """
        Whether a later pass has rows of it.
        """
    @property
    def grid(self, /) -> tuple[int, int, int]:
        """
        Patches in time, height and width.
        """
    @property
    def kv(self, /) -> tuple[int, int]:
        """
        KV indices of its first row and after its last one, also of rows in other passes.
        """
    @property
    def number(self, /) -> int:
        """
        Distinguishes it from every other image that the planner has seen.
        """
    @property
    def pixels(self, /) -> memoryview:
        """
        The pixels, as bytes.
        """
    @property
    def request(self, /) -> int:
        """
        Its request within the pass.
        """

@final
class Inserted:
    """
    Result of an insertion.
    """
    def __repr__(self, /) -> str: ...
    @property
    def existing(self, /) -> int:
        """
        Number of pages of the key that were cached on the device before: the caller's pages for them are duplicates.
        """
    @property
    def node(self, /) -> int:
        """
        The node at which the key ends; 0 if the key has no whole page.
        """
    @property
    def pages(self, /) -> int:
        """
        Number of whole pages of the key.
        """

@final
class LayerPatterns:
    """
    The keys of a PEFT `rank_pattern` or `alpha_pattern`, matched in linear time whatever they are.
    """
    def __new__(cls, /, patterns: SupportsGetItem[int, str]) -> LayerPatterns:
        """
        Takes the patterns in the configuration's order.

        Raises:
            ValueError: There are too many, or one is too long, cannot be read, or would mean something else to Python's `re`.
        """
    def first(self, /, name: str) -> int | None:
        """
        The number of the first pattern that matches a layer's name, as PEFT matches them; None if none does.

        Raises:
            ValueError: The name is too long.
        """

@final
class Load:
    """
    An adapter to load, instead of the one that has its id already. Dropped without a commit it is answered by an
    abort, and requests find what they found before.
    """
    @property
    def adapter_id(self, /) -> int:
        """
        The id that requests bind, at least 1.
        """
    def commit(self, /, status: SupportsIndex, reason: str = "") -> None:
        """
        Answers with a status code: 0 = done, requests may bind the adapter from now on; 5 = it cannot be had.

        Args:
            status: The code.
            reason: Why it cannot be had, for the client.
        """
    @property
    def path(self, /) -> str:
        """
        Where the adapter lies.
        """

@final
class Match:
    """
    The longest cached prefix of a key. The result of `match_and_lock` is a context manager that holds the lock.
    """
    def __enter__(self, /) -> Match: ...
    def __exit__(self, /, _kind: Any, _error: Any, _trace: Any) -> None: ...
    def __repr__(self, /) -> str: ...
    @property
    def device_node(self, /) -> int:
        """
        The node at which the device part of the prefix ends.
        """
    @property
    def host_pages(self, /) -> int:
        """
        Number of pages of the prefix after the device part, which are on the host only.
        """
    @property
    def node(self, /) -> int:
        """
        The node at which the prefix ends, on any tier; 0 without a match.
        """
    @property
    def pages(self, /) -> ndarray:
        """
        Device page ids of the prefix, int32 `(n,)`.
        """
    def unlock(self, /) -> None:
        """
        Releases the lock.

        Raises:
            RuntimeError: The match has no lock: it was released before, or comes from `match_prefix`.
        """

@final
class NodeInfo:
    """
    Properties of a node.
    """
    @property
    def children(self, /) -> int:
        """
        Number of child nodes.
        """
    @property
    def depth(self, /) -> int:
        """
        Number of pages from the start of the sequence to the node's end.
        """
    @property
    def hits(self, /) -> int:
        """
        Number of insertions through the node.
        """
    @property
    def locks(self, /) -> int:
        """
        Number of locks on the node and its descendants.
        """
    @property
    def on_device(self, /) -> bool:
        """
        Whether its pages are on the device.
        """
    @property
    def on_host(self, /) -> bool:
        """
        Whether its pages have copies on the host.
        """
    @property
    def pages(self, /) -> int:
        """
        Number of pages.
        """
    @property
    def parent(self, /) -> int:
        """
        The parent node; 0 for a child of the root.
        """
    @property
    def priority(self, /) -> int:
        """
        The highest priority of its insertions.
        """

@final
class Output:
    """
    New tokens of one sequence of a request, or its end, or both.
    """
    def __repr__(self, /) -> str: ...
    @property
    def cached_tokens(self, /) -> int:
        """
        Tokens of the prompt whose KV was there.
        """
    def embedding(self, /, dimensions: SupportsIndex | None = None, *, normalized: bool = False) -> list[float]:
        """
        The embedding of a request of `submit_embedding`.

        Args:
            dimensions: Leading numbers to return; None for all.
            normalized: Embeddings of the model have norm 1, so one that is cut gets it again.
        """
    @property
    def error(self, /) -> str | None:
        """
        What happened, where the reason is `error`.
        """
    @property
    def finish_reason(self, /) -> str | None:
        """
        `stop`, `length`, `abort`, `deadline` or `error` in the last output, else None.
        """
    @property
    def held_bytes(self, /) -> int:
        """
        Bytes at the end of the text so far that may be the start of a stop string: keep them back.
        """
    def hidden_states(self, /, top: SupportsIndex, given: SupportsIndex, hidden: SupportsIndex) -> list[bytes]:
        """
        The hidden states of the rows that the tokens come from, with arguments as for `logprobs`: float32, those of the prompt's
        other rows, and those of `token_ids`.
        """
    def logprobs(self, /, top: SupportsIndex, given: SupportsIndex, hidden: SupportsIndex = 0) -> list[tuple[float, list[tuple[float, int]], list[float]]]:
        """
        Log-probabilities of the tokens: of each its own, those of the most probable tokens with their ids, best first, and those
        of given tokens.

        Args:
            top: Most probable tokens that the request asks for.
            given: Tokens that it gives.
            hidden: Numbers of a hidden state, if it asks for these.
        """
    def prompt_logprobs(self, /, top: SupportsIndex, given: SupportsIndex, hidden: SupportsIndex = 0) -> list[tuple[float, list[tuple[float, int]], list[float]]]:
        """
        The same of tokens of the prompt, the first of which is the one after `logprob_start_len`.
        """
    @property
    def prompt_words(self, /) -> list[int]:
        """
        Log-probabilities of tokens of the prompt, as `prompt_logprobs` reads them; they come once.
        """
    @property
    def request(self, /) -> int:
        """
        What `Runtime.submit` returned.
        """
    @property
    def sample(self, /) -> int:
        """
        Which of the request's `n` sequences, from 0.
        """
    @property
    def scored(self, /) -> int | None:
        """
        Of a request for no tokens, the one that would come first.
        """
    @property
    def stop_regex(self, /) -> int | None:
        """
        Index of the stop expression that ended it.
        """
    @property
    def stop_string(self, /) -> int | None:
        """
        Index of the stop string that ended it.
        """
    @property
    def stop_token(self, /) -> int | None:
        """
        The stop token that ended it.
        """
    @property
    def text_bytes(self, /) -> int | None:
        """
        With a stop string, the bytes of the output's text before it begins.
        """
    @property
    def token_ids(self, /) -> list[int]:
        """
        New since the last output; a new list at every access. A stop token is the last one.
        """
    @property
    def words(self, /) -> list[int]:
        """
        Those of `token_ids`, as `logprobs` reads them; of a request for no tokens those of the one that would come first.
        """

@final
class PagePool:
    """
    Page allocator of one memory tier, with reference counts.

    It tracks page ids and owns no memory. Give each tier its own range of ids, so that an id of another tier is an
    error. A call that raises changes nothing. Page ids are passed as one-dimensional arrays of 32-bit or 64-bit
    integers, and returned as NumPy arrays of int32.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, pages: SupportsIndex, *, first: SupportsIndex = 0, order: str = "lowest") -> PagePool:
        """
        Creates a pool whose pages are all free.

        Args:
            pages: Number of pages.
            first: Id of the first page; ids are `first` to `first + pages - 1`.
            order: Which free page is allocated next: `lowest` takes the lowest id, `lifo` the page freed last.

        Raises:
            ValueError: An unknown order, or ids that do not fit into int32.
        """
    def __repr__(self, /) -> str: ...
    def allocate(self, /, count: SupportsIndex = 1) -> ndarray:
        """
        Allocates free pages with one reference each: all or none.

        Returns:
            Their ids, int32 `(count,)`.

        Raises:
            PagesError: Fewer than `count` pages are free.
        """
    def audit(self, /, held: Buffer | ndarray) -> None:
        """
        Checks the reference counts against all references. Takes time and memory proportional to the number of pages.

        Args:
            held: Page ids, one entry per reference; a page of the prefix index counts one.

        Raises:
            PagesError: A page leaked, or was freed too often.
        """
    @property
    def available(self, /) -> int:
        """
        Pages that can be allocated.
        """
    def cache(self, /, pages: Buffer | ndarray) -> None:
        """
        Transfers the caller's reference to each page to the prefix index.

        Raises:
            PagesError: A page is already in the index, is free, or belongs to another pool.
        """
    def complete(self, /, step: SupportsIndex) -> int:
        """
        Marks all steps up to `step` as complete, and frees the pages that waited for them.

        Returns:
            Number of pages that became free.
        """
    def free(self, /, pages: Buffer | ndarray) -> None:
        """
        Releases one reference to each page; a page without references is free.

        Raises:
            PagesError: A page is already free, belongs to another pool, or is referenced by the prefix index only.
        """
    def free_after(self, /, pages: Buffer | ndarray, step: SupportsIndex) -> None:
        """
        Releases one reference to each page once `step` is complete: until then the step may write to the page.

        Raises:
            PagesError: As for `free`.
        """
    def make_unique(self, /, page: SupportsIndex) -> tuple[int, bool]:
        """
        Makes a page of the caller writable by copy-on-write.

        Returns:
            The page to write to, and whether `page` must be copied to it first. If not, it is `page` itself.

        Raises:
            PagesError: No page is free for the copy, or the caller holds no reference to `page`.
        """
    def references(self, /, page: SupportsIndex) -> int:
        """
        Number of references to a page: of callers, the prefix index and running steps.

        Raises:
            PagesError: The page belongs to another pool.
        """
    def reset(self, /) -> None:
        """
        Frees every page, whatever its references.
        """
    def share(self, /, pages: Buffer | ndarray) -> None:
        """
        Adds one reference to each page.

        Raises:
            PagesError: A page is free, waits for a step to be freed, or belongs to another pool.
        """
    def stats(self, /) -> PoolStats:
        """
        Returns page counts by state.
        """
    def uncache(self, /, pages: Buffer | ndarray) -> None:
        """
        Releases the prefix index's reference to each page, after the index has evicted it.

        Raises:
            PagesError: A page is not in the index, or belongs to another pool.
        """
    def uncache_after(self, /, pages: Buffer | ndarray, step: SupportsIndex) -> None:
        """
        Like `uncache`, once `step` is complete: for pages that a copy to another tier still reads.

        Raises:
            PagesError: As of `uncache`.
        """

@final
class Pass:
    """
    One staged forward pass.
    """
    @property
    def adapters(self, /) -> bytes | None:
        """
        `[requests]` int64: the adapter of each request, -1 for none; None when no request has one.
        """
    @property
    def decode(self, /) -> bool:
        """
        Whether every request has exactly one row, of text, which sees all KV up to itself.
        """
    @property
    def images(self, /) -> PassImages | None:
        """
        Images that give some rows their embeddings; None when all rows are text.
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
    def token_history(self, /) -> bytes | None:
        """
        `[tokens, 2]` int64: storage slots, and the tokens that they have KV of, to be recorded with those of the pass; None when
        no tokens need be recorded.
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
class PassImages:
    """
    The images of a pass. Their rows are staged with the token `vocab_size`, which no text has.
    """
    @property
    def positions(self, /) -> bytearray:
        """
        `[3, tokens]` int64: rotary position of each row of the pass on the axes time, height and width.
        """
    @property
    def spans(self, /) -> list[ImageSpan]:
        """
        In the order of their rows.
        """

@final
class Planner:
    """
    Turns frames into passes over a staging block. Give it to `Server.serve`.
    """
    def __new__(cls, /, *, page_size: SupportsIndex, total_pages: SupportsIndex, vocab_size: SupportsIndex, max_positions: SupportsIndex, row_pages: SupportsIndex, max_requests: SupportsIndex, chunk_tokens: SupportsIndex, max_slots: SupportsIndex, random_seed: SupportsIndex, states: SupportsIndex = 0, masks: bool = True, adapter_slots: SupportsIndex = 0, vision: tuple[SupportsIndex, SupportsIndex, SupportsIndex] | None = None, embedding_size: SupportsIndex = 0, embed_size: SupportsIndex = 0) -> Planner:
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
            masks: The engine applies attention masks; otherwise requests whose mask is not causal are rejected.
            adapter_slots: Adapters that a pass can hold, no adapter being one of them; 0 for an engine without adapters.
            vision: What the engine's encoder takes: numbers of a patch, patches that are merged per side, and patches of
                the longest side. None: requests with images are rejected.
            embedding_size: Numbers of a pooled row of an embedding model; 0 for a model that generates.
            embed_size: Numbers of an embedding of `input_embeds`; 0: requests with some are rejected.

        Raises:
            ValueError: A limit is 0, or the pool has more storage slots than a 31-bit index names.
        """
    @property
    def attention_mask_bytes(self, /) -> int:
        """
        Bytes of the largest attention mask of a pass, outside of the staging block.
        """
    @property
    def block_bytes(self, /) -> int:
        """
        Size of the staging block in bytes.
        """
    def draft(self, /, *, num_drafts: SupportsIndex, max_depth: SupportsIndex, min_n: SupportsIndex, max_n: SupportsIndex | None, capacity: SupportsIndex, context_bytes: SupportsIndex, host_pages: SupportsIndex, graph_sizes: SupportsGetItem[int, SupportsIndex], suffix: tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex] | None) -> None:
        """
        Drafts for requests that ask for them, from what contexts have said.

        Args:
            num_drafts: Most drafts of a request.
            max_depth: Longest match, in tokens.
            min_n: Shortest match that drafts.
            max_n: Longest match, if that is less than `max_depth`.
            capacity: Tokens of the history that contexts share.
            context_bytes: Memory of contexts, above which the one that was not used for longest is released.
            host_pages: Size of the engine's host pool.
            graph_sizes: Rows of the graphs that a step may run as, rising.
            suffix: For suffix decoding its `max_spec_factor` and `min_token_prob`; None for n-gram drafts only.

        Raises:
            ValueError: A limit is out of range, or the planner was given away.
        """
    def draft_by_model(self, /, *, num_drafts: SupportsIndex, host_pages: SupportsIndex, graph_sizes: SupportsGetItem[int, SupportsIndex], model_sizes: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Drafts for requests that ask for them, as the draft model computes them in the graphs of the steps.

        Args:
            num_drafts: Most drafts of a request.
            host_pages: Size of the engine's host pool.
            graph_sizes: Rows of the graphs that a step may run as, rising.
            model_sizes: Rows of those that run the draft model, rising.

        Raises:
            ValueError: The planner was given away.
        """
    @property
    def layout(self, /) -> list[tuple[str, tuple[str, int, int]]]:
        """
        The arrays of the staging block, in the order in which they lie.

        Returns:
            Of each array its name, and dtype, byte offset and capacity in elements.
        """

@final
class PoolStats:
    """
    Page counts of a `PagePool` by state.
    """
    def __repr__(self, /) -> str: ...
    @property
    def cached(self, /) -> int:
        """
        Used pages with a reference of the prefix index.
        """
    @property
    def capacity(self, /) -> int:
        """
        Pages of the pool.
        """
    @property
    def free(self, /) -> int:
        """
        Pages that can be allocated.
        """
    @property
    def high_water(self, /) -> int:
        """
        Highest number of used pages so far.
        """
    @property
    def leaving(self, /) -> int:
        """
        Used pages that become free when running steps complete.
        """
    @property
    def pinned(self, /) -> int:
        """
        Cached pages that also have other references: evicting them frees nothing.
        """
    @property
    def used(self, /) -> int:
        """
        Pages with at least one reference: `capacity - free`.
        """

@final
class RadixIndex:
    """
    Prefix cache index: a radix tree that maps token sequences to KV page ids.

    It owns no memory. Tokens and page ids are passed as one-dimensional arrays of 32-bit or 64-bit integers; page ids
    are returned as NumPy arrays of int32. Tokens after the last whole page of a key are ignored. Nodes are identified
    by numbers, which are not reused after an eviction.

    Recency is counted in calls: each call is one unit of the time by which `lru` and similar policies evict.
    """
    def __bool__(self, /) -> bool:
        """
        Returns True, also if the index is empty.
        """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, page_size: SupportsIndex = 1, policy: str = "lru", *, bigram: bool = False, events: bool = False, split_keeps_age: bool = False) -> RadixIndex:
        """
        Creates an empty index.

        Args:
            page_size: Tokens per page, 1 to 1,024.
            policy: Eviction policy: `lru`, `lfu`, `fifo`, `filo`, `mru`, `slru` or `priority`.
            bigram: Keys are pairs of neighbouring tokens: `n` tokens are `n - 1` units.
            events: Record KV events, at the cost of one SHA-256 per page.
            split_keeps_age: Both parts of a split node keep its creation time, as in SGLang 0.5.23; otherwise the
                first part is new, as in 0.5.17.

        Raises:
            RadixError: The page size is out of range, or the policy is unknown.
        """
    def __repr__(self, /) -> str: ...
    def backup(self, /, node: SupportsIndex, host: Buffer | ndarray) -> ndarray:
        """
        Registers a host copy of a device node. Keep the node locked until the copies are done.

        Args:
            node: Its number.
            host: Host page ids, one for each of its device pages.

        Returns:
            Copies to make, int32 `(n, 2)`: from a device page to a host page.

        Raises:
            RadixError: The number of pages differs, or the node is not on the device, already has a host copy, or was
                evicted.
        """
    @property
    def device_pages(self, /) -> int:
        """
        Number of pages on the device.
        """
    def evict(self, /, pages: SupportsIndex) -> Evicted:
        """
        Evicts leaves from the device until at least `pages` pages are evicted, or no unlocked leaf is left.

        Leaves are evicted whole, so the result may have more pages. Nodes with a host copy stay on the host.
        """
    def evict_host(self, /, pages: SupportsIndex) -> Evicted:
        """
        Evicts leaves from the host until at least `pages` host pages are free, or no unlocked leaf is left.
        """
    def evict_to_host(self, /, pages: SupportsIndex, free_host: Buffer | ndarray) -> Evicted:
        """
        Like `evict`, but moves evicted nodes to the host while host pages are left.

        Args:
            pages: Device pages to evict.
            free_host: Ids of free host pages. Unused ones are returned in `Evicted.host`.
        """
    @property
    def evictable_pages(self, /) -> int:
        """
        Number of unlocked device pages.
        """
    @property
    def host_pages(self, /) -> int:
        """
        Number of pages on the host.
        """
    def info(self, /, node: SupportsIndex) -> NodeInfo:
        """
        Properties of a node.

        Raises:
            RadixError: The node was evicted.
        """
    def insert(self, /, tokens: Buffer | ndarray, pages: Buffer | ndarray, *, namespace: str | None = None, limit: SupportsIndex | None = None, priority: SupportsIndex = 0, chunked: bool = False, inserted: SupportsIndex = 0) -> Inserted:
        """
        Inserts a key whose KV is in the given device pages.

        Args:
            tokens: The key: token ids below 2^32.
            pages: Page ids, one for each whole page of the key. Cached parts of the key keep their pages.
            namespace: Sequences in different namespaces never share KV.
            limit: Use only this many tokens from the start of the key; None for all.
            priority: Minimum priority of the nodes on the path, for the policy `priority`.
            chunked: A chunk of a prompt that will be inserted again with more tokens: does not count as a hit.
            inserted: Number of tokens that this sequence inserted before: nodes within them count no hit.

        Raises:
            RadixError: The number of page ids is not the number of whole pages of the key.
            TypeError: `tokens` or `pages` is not an array of integers.
            OverflowError: A token does not fit into uint32, or a page not into int32.
        """
    def insert_new(self, /, tokens: Buffer | ndarray, pool: PagePool, *, namespace: str | None = None, limit: SupportsIndex | None = None, priority: SupportsIndex = 0, chunked: bool = False, inserted: SupportsIndex = 0) -> tuple[Inserted, ndarray]:
        """
        Inserts a key, and allocates the pages of its new part from a pool, as pages of the prefix index.

        Args:
            tokens: The key: token ids below 2^32.
            pool: Where pages are allocated. After an eviction, return them with `PagePool.uncache`.
            namespace: Sequences in different namespaces never share KV.
            limit: Use only this many tokens from the start of the key; None for all.
            priority: Minimum priority of the nodes on the path, for the policy `priority`.
            chunked: A chunk of a prompt that will be inserted again with more tokens: does not count as a hit.
            inserted: Number of tokens that this sequence inserted before: nodes within them count no hit.

        Returns:
            The result, and the ids of the new pages, int32 `(pages - existing,)`.

        Raises:
            PagesError: The pool has too few free pages; nothing was inserted.
            TypeError: `tokens` is not an array of integers.
            OverflowError: A token does not fit into uint32.
        """
    def load(self, /, node: SupportsIndex, device: Buffer | ndarray) -> ndarray:
        """
        Loads a node and its ancestors from the host to the device. Keep the node locked until the copies are done.

        Args:
            node: Its number.
            device: Device page ids, `Match.host_pages` of them.

        Returns:
            Copies to make, int32 `(n, 2)`: from a host page to a device page.

        Raises:
            RadixError: The number of pages differs, or the node was evicted.
        """
    def lock(self, /, node: SupportsIndex) -> int:
        """
        Locks a node and its ancestors against eviction; locks are counted.

        Returns:
            Number of device pages that became protected.

        Raises:
            RadixError: The node was evicted.
        """
    def match_and_lock(self, /, tokens: Buffer | ndarray, *, namespace: str | None = None, limit: SupportsIndex | None = None) -> Match:
        """
        Finds the longest cached prefix and locks it on all tiers, so that it is not evicted before it is unlocked.

        Use the result as a context manager, or unlock it with `Match.unlock`.

        Args:
            tokens: The key: token ids below 2^32.
            namespace: Sequences in different namespaces never share KV.
            limit: Use only this many tokens from the start of the key; None for all.

        Raises:
            TypeError: `tokens` is not an array of integers.
            OverflowError: A token does not fit into uint32.
        """
    def match_prefix(self, /, tokens: Buffer | ndarray, *, namespace: str | None = None, limit: SupportsIndex | None = None) -> Match:
        """
        Finds the longest cached prefix, and marks it as the most recently used.

        Args:
            tokens: The key: token ids below 2^32.
            namespace: Sequences in different namespaces never share KV.
            limit: Use only this many tokens from the start of the key; None for all.

        Raises:
            TypeError: `tokens` is not an array of integers.
            OverflowError: A token does not fit into uint32.
        """
    @property
    def memory_bytes(self, /) -> int:
        """
        Memory of the index, in bytes.
        """
    def merge(self, /) -> int:
        """
        Merges unlocked nodes with their only child where this copies nothing. Visits every node, so call it when
        idle.

        Returns:
            Number of nodes removed.
        """
    def partial(self, /, tokens: Buffer | ndarray, found: Match, *, namespace: str | None = None) -> tuple[int, int, int, bool] | None:
        """
        Finds a cached page that shares a prefix with the rest of a key, after `found`, for copy-on-write.

        Returns:
            Page id, number of shared tokens, node, and whether the page is on the device; None if there is no such
            page.
        """
    def path_pages(self, /, node: SupportsIndex) -> ndarray:
        """
        Device page ids of the path to a node, int32, from the start of the sequence.

        Raises:
            RadixError: The node was evicted.
        """
    def peek(self, /, tokens: Buffer | ndarray, *, namespace: str | None = None, limit: SupportsIndex | None = None) -> tuple[int, int]:
        """
        Number of pages of a key on the device, and of those after them on the host only. Does not update the recency.
        """
    @property
    def protected_pages(self, /) -> int:
        """
        Number of locked device pages.
        """
    def reset(self, /) -> Evicted:
        """
        Clears the index, locked nodes included, and returns all pages.
        """
    def take_events(self, /) -> list[CacheEvent]:
        """
        Returns the KV events since the last call.
        """
    def to_dot(self, /) -> str:
        """
        The tree in Graphviz's DOT language, with sizes, locks and recency.
        """
    def to_json(self, /) -> str:
        """
        The tree as JSON.
        """
    def unlock(self, /, node: SupportsIndex) -> int:
        """
        Releases one lock of a node and its ancestors.

        Returns:
            Number of device pages that became evictable.

        Raises:
            RadixError: The node is not locked, or was evicted.
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
    def draft_positions(self, /) -> list[list[int]]:
        """
        Their positions.
        """
    @property
    def drafts(self, /) -> list[list[int]]:
        """
        Drafts for the next request of each, empty when no request has some.
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
    def position_logprobs(self, /) -> list[tuple[int, list[tuple[float, list[tuple[float, int]], list[float]]], list[tuple[float, list[tuple[float, int]], list[float]]]]]:
        """
        Log-probabilities that extensions asked for, of each request that has some: its number, those of its prompt, those of
        its tokens. Each position has the log-probability of its token, the most probable tokens with theirs, best first, and those
        of tokens that were given.
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
    def __new__(cls, /, tokens: SupportsGetItem[int, SupportsIndex], positions: SupportsGetItem[int, SupportsIndex], pages: SupportsGetItem[int, SupportsIndex], last_page_len: SupportsIndex, samplers: SupportsGetItem[int, tuple[SupportsIndex, Sampler]] = ..., *, context_id: SupportsIndex = 0, masks: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]] | None = None, logit_mask: SupportsGetItem[int, SupportsIndex] | None = None, drafts: SupportsGetItem[int, SupportsIndex] = ..., draft_positions: SupportsGetItem[int, SupportsIndex] = ..., adapter_id: SupportsIndex = ..., images: SupportsGetItem[int, Image] = ..., audio: SupportsGetItem[int, tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex]]] = ..., state_slot: SupportsIndex | None = None, state_reset: bool = False, wants_drafts: bool = False, extension: Extension | None = None) -> Request:
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
            images: In the order of their rows.
            audio: (row, features) pairs: first row of a clip, and its log-mel features.
            state_slot: Slot of recurrent state, None = none. All requests of a batch have one, or none has.
            state_reset: The slot starts from zeros.
            wants_drafts: The answer may bring drafts for the next request.
            extension: What it asks for beyond the Pie protocol.
        """

@final
class Requests:
    """
    Requests for `Runtime.submit_all`, which `Runtime.submit` puts here by its argument `into`.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /) -> Requests: ...
    def __repr__(self, /) -> str: ...

@final
class Runtime:
    """
    Drivers with a scheduler for each: requests in, tokens out.

    The constructor starts every driver process, one of each replica, and returns at once; `wait_ready` waits for them. All
    work is done by threads that never take Python's lock. A driver that dies is started again, and its requests continue where
    they were. Use it as a context manager, or call `shutdown`.
    """
    def __enter__(self, /) -> Runtime: ...
    def __exit__(self, /, _kind: Any | None = None, _error: Any | None = None, _traceback: Any | None = None) -> None: ...
    def __new__(cls, /, model: str | PathLike[str], *, python: str | PathLike[str], **settings: "object") -> Runtime:
        """
        Starts the drivers.

        Args:
            model: Folder of the snapshot.
            python: The drivers' interpreter, which has this package: `sys.executable`.
            settings: See `Config` in `rust/py/src/runtime/config.rs`.

        Raises:
            ValueError: A value is out of range.
            TypeError: An unknown setting, or a value of another type.
            OSError: The log file cannot be opened.
            StartError: No thread can be started.
        """
    def abort(self, /, request: SupportsIndex) -> None:
        """
        Ends a request, with the reason `abort`. One that has ended, or never was, is ignored.
        """
    def capabilities(self, /) -> dict:
        """
        What the first driver can do, by the names of its handshake.

        Raises:
            RuntimeError: It is not ready.
        """
    def end_session(self, /, session: SupportsIndex) -> None:
        """
        Lets the pages of a session go.
        """
    def end_trace(self, /) -> list[tuple[Path, int, str | None]]:
        """
        Ends a trace, or tells of one that ended by itself: for each replica its file, the steps in it, and why it ended early.
        Nothing where there was no trace.
        """
    def flush_cache(self, /) -> bool:
        """
        Empties the prefix indices. False, with nothing done, where requests run or wait.
        """
    def load_adapter(self, /, adapter_id: SupportsIndex, path: str) -> None:
        """
        Has every driver read a LoRA adapter, without Python's lock; requests of others continue meanwhile. A driver that is
        started again reads it again.

        Args:
            adapter_id: From 1, at most 2**63 - 2; one that was loaded before gets the new files, so let its requests end first.
            path: A folder as PEFT saves it, or a safetensors file next to its `adapter_config.json`; on the drivers' machine.

        Raises:
            StartError: A driver does not take it, with the reason in its log, or there is no driver.
        """
    def log_lines(self, /) -> list[str]:
        """
        What the drivers have logged since the last call, oldest first, the last 1000 lines at most. With several replicas
        each line begins with `[number] `.
        """
    def metrics(self, /) -> list[list[tuple[str, bool, str, tuple[str, str] | None, float]]]:
        """
        Metrics of each replica. Those that are rates are about the time since the last call.

        Returns:
            For each replica a list of name, whether it is a counter, what it counts, a label with its value or None, and the
            value.
        """
    def pause(self, /, *, retract: bool = False) -> bool:
        """
        Computes nothing more until `resume`. Requests are still taken, and can be aborted; deadlines wait. Returns when no
        step is in flight; false where one is after a minute.

        Args:
            retract: Requests give back what was computed, and are computed again afterwards; the prefix index is emptied.
        """
    def poll(self, /, timeout_s: SupportsFloat | SupportsIndex | None = None) -> list[Output]:
        """
        Waits for outputs, without Python's lock, and returns all there are; none when the time is over, or after a shutdown.
        Outputs of one sequence that were not fetched yet are one, so that a slow caller gets fewer and longer ones.
        """
    def resume(self, /) -> None:
        """
        Continues after `pause`.
        """
    @staticmethod
    def setting_names() -> list[str]:
        """
        The names of the settings.
        """
    def shutdown(self, /) -> None:
        """
        Ends every request, with the reason `abort`, and stops the drivers. A second call does nothing.
        """
    def start_trace(self, /, path: str | PathLike[str], *, skip: SupportsIndex = 0, steps: SupportsIndex | None = None) -> None:
        """
        Writes each step from now on into a file of Chrome trace events: how long the driver took, and how long it waited for
        this side.

        Args:
            path: The file; of several replicas `.N` follows for each after the first.
            skip: Steps before the first that is written.
            steps: Steps that are written; None until `end_trace`.

        Raises:
            StartError: Steps are traced already, or the file cannot be made.
        """
    def stats(self, /) -> dict:
        """
        Counts of all replicas, and under `replicas` those of each. Of `steps`, `prompt_steps` had parts of prompts; all had
        `rows`. `driver_s` are the seconds that drivers took for them, from request to answer; `host_s` those from answer to
        request, when devices wait for this side, with `gap_us_p50` and `gap_us_p99` of a step.
        """
    def submit(self, /, token_ids: Buffer | ndarray | list[int], *, max_new_tokens: SupportsIndex = 128, min_new_tokens: SupportsIndex = 0, temperature: SupportsFloat | SupportsIndex = 1.0, top_k: SupportsIndex = ..., top_p: SupportsFloat | SupportsIndex = 1.0, min_p: SupportsFloat | SupportsIndex = 0.0, seed: SupportsIndex | None = None, frequency_penalty: SupportsFloat | SupportsIndex = 0.0, presence_penalty: SupportsFloat | SupportsIndex = 0.0, repetition_penalty: SupportsFloat | SupportsIndex = 1.0, logit_bias: SupportsGetItem[int, tuple[SupportsIndex, SupportsFloat | SupportsIndex]] = ..., stop_token_ids: SupportsGetItem[int, SupportsIndex] = ..., stop: SupportsGetItem[int, str] = ..., stop_regex: SupportsGetItem[int, str] = ..., ignore_eos: bool = False, n: SupportsIndex = 1, priority: SupportsIndex | None = None, routing_key: str | None = None, session: SupportsIndex | None = None, namespace: str | None = None, adapter_id: SupportsIndex | None = None, grammar: tuple[str, str] | None = None, grammar_after: SupportsGetItem[int, SupportsIndex] = ..., logit_processor: str | None = None, custom_params: str | None = None, logprobs: tuple[SupportsIndex, SupportsGetItem[int, SupportsIndex], SupportsIndex | None] | None = None, logprobs_original: bool = False, hidden_states: bool = False, speculate: bool = False, deadline_s: SupportsFloat | SupportsIndex | None = None, streams: bool = True, images: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, tuple[SupportsIndex, SupportsIndex, SupportsIndex], bytes, bytes]] = ..., input_embeds: bytes | None = None, into: Requests | None = None) -> int:
        """
        Hands a request in and returns its id at once. What comes of it is for `poll`; one that cannot be served, because its
        prompt is too long, for example, ends with the reason `error`.

        Args:
            token_ids: The prompt: an array of integers, or a list.
            max_new_tokens: Most tokens to produce; cut to what model and pool have room for.
            min_new_tokens: Tokens before which no stop token may come.
            temperature: 0 for the most probable token.
            top_k: Tokens kept; -1 for all.
            top_p: Probability mass kept.
            min_p: Fraction of the largest probability that a token must have.
            seed: With the position it fixes what is sampled.
            frequency_penalty: Taken from a token's logit for each time that it was produced.
            presence_penalty: Taken from the logit of a token that was produced.
            repetition_penalty: Divides the logit of a token that was produced, or multiplies it if it is below 0.
            logit_bias: Tokens, and what is added to their logits.
            stop_token_ids: They end it, besides the model's own.
            stop: Texts that end it.
            stop_regex: Expressions that end it where they match, in the syntax of Rust's `regex`.
            ignore_eos: The model's own do not end it.
            n: Sequences that continue from the prompt.
            priority: Higher comes first.
            routing_key: Requests with one key go to one replica, and are one group for the policy of that name.
            session: A conversation whose pages are kept; it stays with one replica.
            namespace: Requests of different ones share no prefix; SGLang's `extra_key`.
            adapter_id: What `load_adapter` loaded; None for the model alone. Different ones share no prefix.
            grammar: What binds the output: `json_schema`, `regex`, `ebnf`, `lark` or `structural_tag`, and its text. It is compiled
                while the request waits; a wrong one ends it with the reason `error`.
            grammar_after: The tokens after which the grammar binds, as those that end a model's thinking; none for the start.
            logit_processor: SGLang's `custom_logit_processor`, as `CustomLogitProcessor.to_str` writes it.
            custom_params: Its parameters, as JSON.
            logprobs: Log-probabilities of its tokens, None for none: how many most probable tokens of each position, tokens whose
                log-probabilities are wanted at each position, and the index of a token of the prompt, those after which are wanted,
                too, or None.
            logprobs_original: They are those before the temperature.
            hidden_states: Those of the rows that are computed, after their log-probabilities; see `Output.hidden_states`.
            speculate: The driver may draft for it.
            deadline_s: Seconds after which it ends, finished or not.
            streams: Outputs come with every step, and `max_token_gap_ms` holds between them. Else each sequence has one
                output, at its end.
            images: Those of the prompt, in its order. Of each the index of its first token, its tokens, its grid (time, height and
                width in patches), its pixels (float32 `[patches, values of a patch]`), and the rotary positions of its tokens
                (uint32 `[tokens, 3]`, or none).
            input_embeds: Float32 `[tokens, embed_size]` as bytes, in place of `token_ids`, which are ignored.
            into: Where the request is put instead, to be handed in with others by `submit_all`; then its index there is returned.

        Raises:
            ValueError: A parameter is out of range, or the driver cannot do what is asked for.
            TypeError: `token_ids` is neither.
            OverflowError: A token of the prompt does not fit into uint32, or another number not into 64 bits.
            StartError: No driver is left.
            RuntimeError: The drivers are not ready, or the runtime is shut down.
        """
    def submit_all(self, /, requests: Requests) -> list[int]:
        """
        Hands requests in and returns their ids, in order. No step is laid out between them: those that do not stream fill steps as
        large as can be. Afterwards `requests` is empty.

        Raises:
            StartError: No driver is left.
            RuntimeError: The drivers are not ready, or the runtime is shut down.
        """
    def submit_embedding(self, /, token_ids: Buffer | ndarray | list[int], *, dimensions: SupportsIndex | None = None, priority: SupportsIndex | None = None, namespace: str | None = None, adapter_id: SupportsIndex | None = None, into: Requests | None = None) -> int:
        """
        Hands in a request for an embedding, whose only output has it; see `submit`.

        Args:
            token_ids: The prompt: an array of integers, or a list.
            dimensions: Leading numbers to return (Matryoshka); None for all.
            priority, namespace, adapter_id, into: As in `submit`.

        Raises:
            ValueError: A parameter is out of range, or the model generates text.
            TypeError, OverflowError, StartError, RuntimeError: As `submit`.
        """
    def unload_adapter(self, /, adapter_id: SupportsIndex) -> None:
        """
        Forgets an adapter that no request has: a driver that is started again does not read it, and one that has it drops it
        when it needs the room. An id that is not loaded is ignored.
        """
    def wait_ready(self, /, timeout_s: SupportsFloat | SupportsIndex | None = None) -> bool:
        """
        Waits until every driver serves; False when the time is over. To show progress, call it again and again with a short
        time, and `log_lines` in between.

        Raises:
            StartError: A driver ended, or was not ready in time; with the last lines of its log.
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
        Of an embedding model: the pooled row. Otherwise reserved by the protocol: no output.
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
    Owns the shared-memory region and iterates over the work that needs Python: `Batch`, `Copy` and `Load` objects, and `Wake` where another
    thread has called `wake`. Everything
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
    def __next__(self, /) -> Batch | Copy | Step | Load | Wake:
        """
        Waits for the next job, without the GIL; ends when the server was stopped.

        Raises:
            LostError: The device can run nothing any more, or a step failed on one rank of several, so that none can continue.
        """
    def counts(self, /) -> Counts:
        """
        What was served so far, without the warm-up; may be called from any thread, and delays no batch.

        Raises:
            RuntimeError: `serve` was not called.
        """
    @property
    def name(self, /) -> str:
        """
        Name of the region.
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
    def serve(self, /, planner: Planner, block: Buffer, report: Any, *, host_pages: SupportsIndex = 0, graph_path: GraphPath | None = None, steps: bool = False) -> None:
        """
        Takes the planner and the staging block; iterate over the server afterwards.

        Args:
            planner: It cannot be used by anyone else from now on.
            block: Writable bytes, at least `planner.block_bytes` of them. The engine must not write to them.
            report: Called as `report(kind, text)` for what deserves a log line.
            host_pages: Size of the engine's host pool; 0 for none.
            graph_path: Answers the batches that its graphs can run, without Python.
            steps: Iterate over these too, as `Step` objects, once they are answered.

        Raises:
            ValueError: The block is too small or not writable, or planner or graph path were given away before.
            RuntimeError: The server serves already.
        """
    def set_adapter_slots(self, /, slots: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]) -> None:
        """
        Replaces the device slots of adapters, for the steps of graphs. Call it when they have changed, before the iteration
        continues: a graph reads whatever its slot holds.

        Args:
            slots: Id and slot of each loaded adapter that graphs can apply. Steps with others are passes.

        Raises:
            RuntimeError: `serve` was not called.
        """
    def set_hidden_size(self, /, size: SupportsIndex) -> None:
        """
        Rejects requests for hidden states of another size than `size`, each by itself; before, any size is accepted.

        Args:
            size: Numbers of a hidden state of the model.

        Raises:
            RuntimeError: `serve` was not called.
        """
    def stop(self, /) -> None:
        """
        Ends the iteration; may be called from any thread.
        """
    def unlink(self, /) -> None:
        """
        Ends the iteration, removes the region's name and aborts requests that wait. The mapping lives on as long as the
        server.
        """
    def wake(self, /) -> None:
        """
        Makes the iteration give a `Wake` soon, after at most one request; may be called from any thread. Several calls may
        give one. After a `Wake` a request that waits comes before the next one.
        """
    def warm_up(self, /, frame: bytes) -> Batch:
        """
        Plans a request frame of the caller's own, for warm-up: its answer goes nowhere. It may bind `WARM_UP_ADAPTER`.

        Raises:
            RuntimeError: `serve` was not called, or a batch is open.
            WireError: The bytes are not a forward frame, or its arrays contradict each other.
        """
    def warm_up_graph_path(self, /, frame: bytes) -> bool:
        """
        Runs a request frame of the caller's own on the graph path, for warm-up: its answer goes nowhere.

        Returns:
            Whether the graph path took it.

        Raises:
            RuntimeError: As `warm_up`, or the graph path failed.
            WireError: As `warm_up`.
        """

@final
class SglangFrontend:
    """
    The frontend of SGLang's HTTP server: reads and writes the messages (msgpack) between its tokenizer manager, its detokenizer and a
    scheduler.

    `receive` and `poll` may run in two threads at once; nothing else may call `poll` of the runtime.
    """
    def __new__(cls, /, runtime: Runtime, classes: SupportsGetItem[int, tuple[str, SupportsGetItem[int, tuple[str, SupportsGetItem[int, SupportsIndex] | None]]]], *, eos_token_ids: SupportsGetItem[int, SupportsIndex], think_end_ids: SupportsGetItem[int, SupportsIndex], stream_interval: SupportsIndex, other_interval: SupportsIndex, max_prompt_tokens: SupportsIndex, context_length: SupportsIndex, truncate: bool, vocab_size: SupportsIndex, speculate: bool, probe_prefix: str, refuse_priority: bool = False, original_logprobs: bool = False, bos_token_id: SupportsIndex | None = None, dp_rank: SupportsIndex | None = None, takes_images: bool = False, read_images: Any | None = None, times: tuple[SupportsFloat | SupportsIndex, SupportsGetItem[int, SupportsIndex], tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]] | None = None, weight_version: str = ..., traces: bool = False) -> SglangFrontend:
        """
        A frontend without requests.

        Args:
            runtime: What computes them, whose drivers are ready.
            classes: SGLang's message classes: of each the name and its fields in their order, each with its default as msgpack,
                None where there is none.
            eos_token_ids: They end a request, unless it ignores them.
            think_end_ids: The tokens that end the model's thinking; none where it is not counted.
            stream_interval: Tokens from one output of a stream to the next.
            other_interval: The same for requests that do not stream.
            max_prompt_tokens: Most tokens of a prompt.
            context_length: Most tokens of a prompt and its answer together.
            truncate: Cut longer prompts instead of refusing them.
            vocab_size: Token ids are below it.
            speculate: The driver may draft for requests.
            bos_token_id: The token that begins a text, which turns of a session leave out.
            refuse_priority: Refuse requests that have a priority.
            original_logprobs: Log-probabilities are those before the temperature.
            probe_prefix: How the names of SGLang's health probes begin.
            dp_rank: Which of several replicas this is.
            takes_images: The model has images; those of requests are refused without.
            read_images: Reads a pickled `MultimodalProcessorOutput`; None where they come as messages. Of each image it returns the first
                token's index in the prompt, the number of tokens, the grid (time, height, width in patches), the pixels (float32
                `[patches, values of a patch]`) and the rotary positions (uint32 `[tokens, 3]`, or none), both as little-endian
                bytes; or it raises ValueError with the answer to the client.
            times: Where the front end makes metrics of the times of requests: `time.perf_counter()` now, a pickled
                `SchedulerReqTimeStats` without the opcodes around it, and where the times lie in it at which a request began to
                wait, was admitted, and had its first token, and by how much
                the time of day is ahead of that clock.
            weight_version: The name of the weights that the drivers start with.
            traces: Keep for `take_traced` what happens to requests that the front end traces.

        Raises:
            FrontEndError: The classes are not those of a version of SGLang that is served.
        """
    def close_session(self, /, session_id: str) -> None:
        """
        Closes a session and lets its pages go. Its requests that run continue; one that is not open is ignored.
        """
    @property
    def open_requests(self, /) -> int:
        """
        Requests that have not ended.
        """
    def open_session(self, /, session_id: str, *, streaming: bool = False, timeout_s: SupportsFloat | SupportsIndex | None = None) -> bool:
        """
        Opens a session, whose requests continue from each other's tokens. False if there is one of that name.

        Args:
            session_id: Its name.
            streaming: It has one request at a time, which continues from the last that ended well.
            timeout_s: Seconds without a request after which `reap_sessions` closes it; None for never.
        """
    @property
    def open_sessions(self, /) -> int:
        """
        Sessions that are open.
        """
    def poll(self, /, timeout_s: SupportsFloat | SupportsIndex | None) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """
        Waits for outputs, without Python's lock, and returns the messages as `receive` does; none when the time is over.
        """
    def reap_sessions(self, /) -> None:
        """
        Closes the sessions that had no request for longer than they allow.
        """
    def receive(self, /, messages: SupportsGetItem[int, bytes]) -> tuple[list[bytes], list[bytes], list[bytes], list[str]]:
        """
        Takes messages of the tokenizer manager.

        Returns:
            Messages for the detokenizer, messages for the tokenizer manager, those of `messages` that are not about requests,
            in their order, and a line for the log for each that cannot be read and has no name to be answered by. No message
            fails another one.
        """
    def set_adapter(self, /, name: str, adapter_id: SupportsIndex | None) -> None:
        """
        Has requests that name an adapter computed with the one that the runtime has loaded as `adapter_id`; with None they are
        refused.

        Args:
            name: The tokenizer manager's `lora_id`.
            adapter_id: Of `Runtime.load_adapter`.
        """
    def set_paused(self, /, paused: bool) -> None:
        """
        Whether nothing is computed for now; health probes are answered all the same.
        """
    def set_unavailable(self, /, reason: str | None) -> None:
        """
        Refuses requests with this reason and the status 503, and aborts the open ones; None serves them again.
        """
    def set_weight_version(self, /, weight_version: str) -> None:
        """
        Names the weights that compute from now on. Answers of SGLang 0.5.23 say which of these versions each token is of (`weight_versions`);
        tokens of a step that runs count as the new version's.
        """
    def take_traced(self, /) -> tuple[list[TracedRequest], int]:
        """
        What happened when to requests that were traced and have ended since the last call; and how many more there were than are
        kept, which is 4,096. Nothing without `traces`.
        """
    def take_waits(self, /) -> list[tuple[float, float]]:
        """
        Of each request that had its first token since the last call: seconds from its arrival to its admission, and from there
        to the token; nothing without `times`.
        """

@final
class SlotGroup:
    """
    Staged slots, class by class in the order of the attributes.
    """
    def __len__(self, /) -> int: ...
    def __new__(cls, /, greedy: SupportsIndex = 0, plain: SupportsIndex = 0, filtered: SupportsIndex = 0, dists: SupportsIndex = 0, logits: SupportsIndex = 0, logprobs: SupportsIndex = 0, entropies: SupportsIndex = 0, prompts: SupportsIndex = 0) -> SlotGroup:
        """
        A group of the given sizes; the planner makes them, tests may.
        """
    @property
    def bias_words(self, /) -> bytes:
        """
        `[words]` int32: biases of the records, each a token and what is added to its logit (bits of float32).
        """
    @property
    def custom(self, /) -> list[tuple[int, int, bytes, bytes]]:
        """
        The slots whose logits a processor of this process changes: slot within the group, context id, the processor, and the
        tokens of the sequence so far as uint32.
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
    def given(self, /) -> bytes:
        """
        Tokens that are given for positions; `[tokens, 2]` int64: number of the position, and token.
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
    def logprob_positions(self, /) -> bytes:
        """
        The slots whose log-probabilities the extension asks for, in the group's order; `[positions, 5]` int64. Number of the slot
        in the group; its token, or -1 for the one that is sampled; most probable tokens that are wanted; 1 for log-probabilities
        after the temperature; numbers of its hidden state.
        """
    @property
    def logprobs(self, /) -> int:
        """
        Slots that return log-probabilities.
        """
    @property
    def mask_words(self, /) -> int:
        """
        Words of the staged logit masks.
        """
    @property
    def plain(self, /) -> int:
        """
        Slots that sample the whole distribution.
        """
    @property
    def prompts(self, /) -> int:
        """
        Slots for the log-probabilities of a prompt's tokens.
        """
    @property
    def records(self, /) -> bytes:
        """
        What is asked of each slot's logits before they are sampled, `[slots, 8]` int32, empty when nothing is. Row of the
        block table, KV indices of the first token that counts and after the last one, frequency, presence and repetition
        penalty (bits of float32), first word of biases, how many they are.
        """

@final
class Step:
    """
    A batch that the graph path answered.
    """
    @property
    def launch_ns(self, /) -> int:
        """
        Nanoseconds of the launch.
        """
    @property
    def parse_ns(self, /) -> int:
        """
        Nanoseconds of copying and validating the archive.
        """
    @property
    def plan_ns(self, /) -> int:
        """
        Nanoseconds of planning and staging.
        """
    @property
    def received_ns(self, /) -> int:
        """
        When the request was seen, by `time.perf_counter_ns`.
        """
    @property
    def requests(self, /) -> int:
        """
        Requests of the batch.
        """
    @property
    def respond_ns(self, /) -> int:
        """
        Nanoseconds of building the response.
        """
    @property
    def tokens(self, /) -> int:
        """
        Rows that the model computed.
        """
    @property
    def wait_ns(self, /) -> int:
        """
        Nanoseconds of waiting for the tokens.
        """

@final
class TracedRequest:
    """
    A request that was traced and has ended. Times are in ns since 1970, and none comes before the one that it follows.
    """
    @property
    def admitted_ns(self, /) -> int | None:
        """
        When it was first admitted.
        """
    @property
    def cached_tokens(self, /) -> int:
        """
        Tokens of its prompt whose KV was there.
        """
    @property
    def ended_ns(self, /) -> int:
        """
        When the frontend received its end.
        """
    @property
    def error(self, /) -> tuple[str, str] | None:
        """
        What went wrong: a word for its kind, and a text.
        """
    @property
    def finish_reasons(self, /) -> list[str]:
        """
        Why each sequence ended: `stop`, `length` or `abort`.
        """
    @property
    def first_token_ns(self, /) -> int | None:
        """
        When the step was answered that gave its first token.
        """
    @property
    def loaded_tokens(self, /) -> int:
        """
        Tokens of its prompt that were loaded from the host.
        """
    @property
    def name(self, /) -> str:
        """
        Its caller's name of it.
        """
    @property
    def output_tokens(self, /) -> int:
        """
        New tokens of all sequences.
        """
    @property
    def parent(self, /) -> tuple[int, int] | None:
        """
        The trace and the span that it is part of; None if it begins a trace.
        """
    @property
    def priority(self, /) -> int | None:
        """
        Its position in the queue, where it has one.
        """
    @property
    def prompt_tokens(self, /) -> int:
        """
        Tokens of its prompt.
        """
    @property
    def received_ns(self, /) -> int:
        """
        When it came.
        """
    @property
    def retractions(self, /) -> int:
        """
        How often the pages of one of its sequences were taken from it.
        """

@final
class Wake:
    """
    Another thread has called `Server.wake`.
    """

def build_info() -> dict[str, str]:
    """
    Information about this build for bug reports: `version`, `profile`, `target`, and `commit`, which is empty unless the build was
    given by `PIE_DRIVER_COMMIT`, as `make` does it.
    """

def check_request_limits(limits: dict[str, SupportsIndex]) -> None:
    """
    Checks names of request limits, as in docs/limits.md.

    Raises:
        ValueError: There is no such limit.
    """

def die_with_parent(parent: SupportsIndex) -> None:
    """
    Has the kernel kill this process as soon as its parent dies, which must be the process `parent`; ends it at once if it is
    another.
    """

def encode_forward(requests: SupportsGetItem[int, Request], driver_id: SupportsIndex = 0) -> bytes:
    """
    Encodes a forward frame as the runtime does.

    Args:
        requests: The batch, in order.
        driver_id: Echoed by the response.
    """

def graph_layout(rows: SupportsIndex, slots: SupportsIndex, grouped: bool = False, extended: bool = False, adapters: bool = False) -> list[tuple[str, tuple[str, int, int]]]:
    """
    The arrays of the block of a graph, in the order in which they lie; see `Planner.layout`.

    Args:
        rows: Tokens that it has room for.
        slots: Of these, how many can be sampled. With fewer slots than rows the block says the row of each slot.
        grouped: Whether the block says which rows read the same KV first; then there are as many slots as rows.
        extended: Whether the block says how logits are changed before they are sampled; then there are as many slots as rows.
        adapters: Whether the block has the device slot of the LoRA adapter of each row; not with `grouped`.
    """

def region_bytes(min_request_bytes: SupportsIndex = 0) -> int:
    """
    Bytes of `/dev/shm` that a region takes.

    Args:
        min_request_bytes: As for `Server`.

    Raises:
        RingError: A region cannot be as large.
    """

def run_grammar_compiler() -> None:
    """
    Compiles grammars for the process that has started this one and shares its standard input, until that closes it.

    Raises:
        OSError: The standard input is no socket of such a process.
    """
