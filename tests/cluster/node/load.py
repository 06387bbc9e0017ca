"""Do: ask for pictures from inside the cluster, as an application would: a line of JSON on stdout for each that ends.

`load.py ADDRESS --clients N --steps S [--requests R]`. Without R it goes on until the file `/tmp/stop` is there; with R
that many are begun at once. The last line counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from pathlib import Path

from mammoth_client import AsyncClient, MammothError

STOP = Path("/tmp/stop")
SEEDS = 4


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--requests", type=int, default=0)
    given = parser.parse_args()
    counts = {"pictures": 0, "failures": 0}
    async with AsyncClient(given.address) as client:

        async def draw(seed: int) -> None:
            start, said = time.monotonic(), {"seed": seed}
            try:
                [picture] = await client.generate(
                    "a red apple", seed=seed, steps=given.steps, on_event=lambda event: tell(seed, event)
                )
                said |= {"sha256": hashlib.sha256(picture.png).hexdigest(), "rgb": picture.receipt.rgb_sha256}
                counts["pictures"] += 1
            except MammothError as err:
                said |= {"error": f"{type(err).__name__}: {err}"}
                counts["failures"] += 1
            say({**said, "s": round(time.monotonic() - start, 2)})

        async def keep_drawing(number: int) -> None:
            while not STOP.exists():
                await draw(number % SEEDS)
                number += given.clients

        if given.requests:
            await asyncio.gather(*(draw(number) for number in range(given.requests)))
        else:
            await asyncio.gather(*(keep_drawing(number) for number in range(given.clients)))
    say(counts)


def tell(seed: int, event: object) -> None:
    """Say that a picture is on its way: from here on it must arrive."""
    if type(event).__name__ == "Accepted":
        say({"seed": seed, "accepted": True})


def say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
