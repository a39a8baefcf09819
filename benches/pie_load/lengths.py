"""Writes the lengths of the standard workload.

    python benches/pie_load/lengths.py > benches/pie_load/lengths.json

256 requests, prompt and output lengths uniform in 100..1024. They come from Python's generator with
seed 0 in the order in which the peers draw them: every prompt draws its length, then its tokens.
"""

from __future__ import annotations

import json
import random

REQUESTS, SHORTEST, LONGEST, LARGEST_TOKEN = 256, 100, 1024, 10_000


def main() -> None:
    """Prints the lengths."""
    draw = random.Random(0).randint
    prompts = []
    for _ in range(REQUESTS):
        prompts.append(draw(SHORTEST, LONGEST))
        for _ in range(prompts[-1]):
            draw(0, LARGEST_TOKEN)
    outputs = [draw(SHORTEST, LONGEST) for _ in range(REQUESTS)]
    print(json.dumps({"prompts": prompts, "outputs": outputs}))


if __name__ == "__main__":
    main()
