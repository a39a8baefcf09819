"""Train the network on the arrays of `prepare.py`: torch and numpy only, one GPU or the CPU."""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network import Pocket, Shape
from torch import Tensor, nn
from torch.nn import functional

KINDS = ("code", "chat")


@dataclass(frozen=True)
class Text:
    """A token array and the offsets where a training window may begin."""

    tokens: Tensor
    starts: Tensor
    size: int

    @staticmethod
    def load(data: Path, name: str, device: str) -> "Text":
        """Read one array: code windows begin with a line, chat windows with a conversation."""
        report = json.loads((data / "data.json").read_text("utf-8"))
        ends = [report["end_of_text"]] + (report["line_ends"] if name.endswith("code") else [])
        tokens = np.load(data / f"{name}.npy").astype(np.int64)
        starts = np.concatenate([[0], np.flatnonzero(np.isin(tokens[:-1], ends)) + 1])
        return Text(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(starts).to(device),
            report[name]["bytes"],
        )

    def windows(self, length: int) -> Iterator[Tensor]:
        """Yield windows of `length + 1` tokens for ever, going over the text evenly."""
        last = len(self.tokens) - length - 1
        device = self.tokens.device
        steps = torch.arange(length + 1, device=device)
        while True:
            starts = torch.arange(0, last, length, device=device)
            starts = starts + torch.randint(length, (1,), device=device)
            starts = starts[torch.randperm(len(starts), device=device)]
            nearest = torch.searchsorted(self.starts, starts).clamp(max=len(self.starts) - 1)
            begins = self.starts[nearest].clamp(max=last)
            yield from self.tokens[begins[:, None] + steps]


def main() -> None:
    """Train, and keep the weights of the best validation loss."""
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(options)
    trainer.run()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = trainer.result()
    torch.save(result, options.out)
    print(json.dumps(result["metrics"], indent=2), flush=True)


class Trainer:
    """One training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = options.device
        self.texts = {
            f"{split}_{kind}": Text.load(options.data, f"{split}_{kind}", self.device)
            for split in ("train", "validation")
            for kind in KINDS
        }
        self.shape = Shape()
        self.network = Pocket(self.shape, options.dropout).to(self.device)
        self.loss = torch.compile(_loss) if options.compile else _loss
        self.optimizer = self._optimizer()
        self.best = copy.deepcopy(self.network)
        self.best_loss = math.inf
        self.best_step = self.step = 0
        self.began = time.monotonic()
        self.seconds = 0.0

    def run(self) -> None:
        """Take steps until the time or the number of steps is used up."""
        batches = self._batches()
        self._take_step(next(batches), 0.0)  # compiles
        self.began = time.monotonic()
        while (progress := self._progress()) < 1:
            self._take_step(next(batches), progress)
            self.step += 1
            if self.step % self.options.eval_every == 0:
                self._select()
        self._select()
        self.seconds = time.monotonic() - self.began

    def result(self) -> dict[str, Any]:
        """Return the best weights in bfloat16, with the shape and the measurements."""
        tokens = self.step * self.options.batch * self.options.length
        metrics: dict[str, Any] = {
            "steps": self.step,
            "selected_step": self.best_step,
            "tokens_seen": tokens,
            "minutes": round(self.seconds / 60, 2),
            "device": _device_name(self.device),
        }
        metrics |= {name: _losses(self.best, text) for name, text in self.texts.items()}
        options = {key: str(value) for key, value in vars(self.options).items()}
        weights = {name: w.bfloat16().cpu() for name, w in self.best.state_dict().items()}
        return {
            "shape": asdict(self.shape),
            "weights": weights,
            "metrics": metrics,
            "options": options,
        }

    def _optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.network.parameters() if p.dim() > 1]
        gains = [p for p in self.network.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ]
        fused = self.device == "cuda"
        return torch.optim.AdamW(groups, lr=self.options.lr, betas=(0.9, 0.95), fused=fused)

    def _batches(self) -> Iterator[Tensor]:
        """Mix code and conversations in the proportion asked for."""
        code = self.texts["train_code"].windows(self.options.length)
        chat = self.texts["train_chat"].windows(self.options.length)
        talks = round(self.options.batch * self.options.chat_share)
        while True:
            rows = [next(chat) for _ in range(talks)]
            rows += [next(code) for _ in range(self.options.batch - talks)]
            yield torch.stack(rows)

    def _progress(self) -> float:
        if self.options.minutes:
            return (time.monotonic() - self.began) / (60 * self.options.minutes)
        return self.step / self.options.steps

    def _rate(self, progress: float) -> float:
        """Warm up linearly, then follow a cosine down to 1 % of the peak."""
        warm = self.options.warmup
        if progress < warm:
            return self.options.lr * (progress / warm + 1e-3)
        fall = (progress - warm) / (1 - warm)
        return self.options.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fall)))

    def _take_step(self, batch: Tensor, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(progress)
        with _precision(self.device):
            loss = self.loss(self.network, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _select(self) -> None:
        """Keep the weights, rounded as they will be stored, if they are the best so far."""
        rounded = copy.deepcopy(self.network)
        for parameter in rounded.parameters():
            parameter.data = parameter.data.bfloat16().float()
        code, chat = (_losses(rounded, self.texts[f"validation_{kind}"]) for kind in KINDS)
        loss = code["nats_per_token"]
        minutes = (time.monotonic() - self.began) / 60
        print(
            f"{minutes:5.2f} min  step {self.step:6d}  validation: code {loss:.4f}"
            f"  chat {chat['nats_per_token']:.4f} nats/token",
            flush=True,
        )
        if loss < self.best_loss:
            self.best, self.best_loss, self.best_step = rounded, loss, self.step


def _loss(network: Pocket, batch: Tensor) -> Tensor:
    logits = network(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def _losses(network: Pocket, text: Text) -> dict[str, float]:
    """Measure the whole text in windows of the longest context, without dropout."""
    network.eval()
    length = network.shape.max_position_embeddings
    total = 0.0
    for begin in range(0, len(text.tokens) - 1, length):
        window = text.tokens[begin : begin + length + 1][None]
        with _precision(window.device.type):
            logits = network(window[:, :-1])
        total += functional.cross_entropy(logits[0].float(), window[0, 1:], reduction="sum").item()
    return {
        "nats_per_token": round(total / (len(text.tokens) - 1), 4),
        "bits_per_byte": round(total / math.log(2) / text.size, 4),
    }


def _precision(device: str) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("target/pocket"))
    parser.add_argument("--out", type=Path, default=Path("target/pocket/pocket.pt"))
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--minutes", type=float, help="instead of --steps")
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    parser.add_argument("--chat-share", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=0.02, help="share of the run")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    return parser.parse_args()


if __name__ == "__main__":
    main()
