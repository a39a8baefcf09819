"""Ask a model with vision about an image file or URL.

Start a server first, for example

    pie-sglang serve Qwen/Qwen3-VL-8B-Instruct
    python examples/vision_chat.py --url http://127.0.0.1:30000 --image photo.jpg

The server fetches URLs of public hosts itself; a file is sent with the request.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import os
from pathlib import Path

from openai import OpenAI

KEY = os.environ.get("PIE_API_KEY", "none")
parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--image", required=True, help="a file, or an http or https URL")
parser.add_argument("--question", default="What is in this picture?")
options = parser.parse_args()

image = options.image
if not image.startswith(("http://", "https://")):
    kind = mimetypes.guess_type(image)[0] or "image/png"
    image = f"data:{kind};base64,{base64.b64encode(Path(image).read_bytes()).decode()}"

client = OpenAI(base_url=f"{options.url}/v1", api_key=KEY)
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": options.question},
            ],
        }
    ],
    max_tokens=64,
)
print("answer:", answer.choices[0].message.content)
