"""Translate: `mammoth generate` and `mammoth replay`: words to a request, pictures and receipts to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mammoth_client._core import generate_request
from mammoth_client.cli.app import DIFFERS
from mammoth_client.cli.deploy import reached
from mammoth_client.cli.files import STDOUT, check, save
from mammoth_client.cli.options import connect, connection, pair
from mammoth_client.cli.progress import shown
from mammoth_client.client import Client
from mammoth_client.receipts import GenerateFields, Receipt
from mammoth_client.types import Picture
from mammoth_wire.errors import InvalidRequest

__all__ = ["generate", "replay"]

FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)


@click.command()
@click.argument("prompt")
@click.option("-o", "--output", type=FILE, default=Path("mammoth.png"), show_default=True,
              help="PNG file to write; - is standard output.")  # fmt: skip
@click.option("--size", callback=pair, metavar="WxH", help="Pixels, multiples of 16.")
@click.option("--grid", callback=pair, metavar="WxH", help="Visual tokens; a sixteenth of the size unless given.")
@click.option("--steps", type=int, help="Denoising steps.")
@click.option("--guidance", type=float, help="How strongly the prompt steers the drawing; at most 1 is off.")
@click.option("--cfg-range", type=float, nargs=2, metavar="LO HI", help="Part of the steps, 0 to 1, that is guided.")
@click.option("--seed", type=int, help="Equal seeds give equal pictures; chosen by the server unless given.")
@click.option("--negative", "negative_prompt", help="What the picture should not show.")
@click.option("--num-images", type=int, help="Pictures to make; number i uses seed + i.")
@click.option("--ar-guidance", type=float, help="How strongly the prompt steers the visual tokens; at most 1 is off.")
@click.option("--temperature", type=float, help="Randomness of the visual tokens; 0 always takes the likeliest.")
@click.option("--top-k", type=int, help="Choose among this many tokens; 0 is off.")
@click.option("--top-p", type=float, help="Choose among the likeliest tokens of this much probability.")
@click.option("--receipt", type=FILE, help="Receipt file; OUTPUT.receipt.json unless given, none for standard output.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors, and JSON if asked for.")
@click.option(
    "--deployment",
    metavar="NAMESPACE/NAME",
    help="Reach this MammothDeployment through the kubeconfig, instead of --address.",
)
@connection
def generate(
    *, prompt: str, output: Path, size: tuple[int, int] | None, grid: tuple[int, int] | None, receipt: Path | None,
    as_json: bool, quiet: bool, deployment: str | None, address: str, timeout_s: float, token_file: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Draw PROMPT and write a PNG file, with its receipt beside it.

    Several pictures are written as OUTPUT-0.png, OUTPUT-1.png and so on. An option that is left out takes the
    server's default. When the picture goes to standard output, everything that is said goes to standard error.
    """
    fields: Any = given
    fields["width"], fields["height"] = size or (None, None)
    fields["ar_width"], fields["ar_height"] = grid or (None, None)
    generate_request(prompt, fields)
    files = _files(output, receipt, fields["num_images"] or 1)
    with reached(address, deployment) as server, connect(server, timeout_s, token_file) as client:
        pictures = _draw(client, prompt, fields, quiet=quiet)
    written = [_write(picture, *files[picture.image_index]) for picture in pictures]
    if as_json:
        click.echo(json.dumps(written, indent=2), err=output == STDOUT)
    elif not quiet:
        click.echo("\n".join(_line(entry) for entry in written), err=output == STDOUT)


@click.command(short_help="Draw the picture of a RECEIPT again and compare.")
@click.argument("receipt", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=FILE, help="Also write the new picture to this PNG file; - is standard output.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@connection
def replay(
    *, receipt: Path, output: Path | None, quiet: bool, address: str, timeout_s: float, token_file: Path | None
) -> int:
    """Draw the picture of a RECEIPT file again and compare the digests of the pixels.

    Exits with 0 when they are the same, with 1 when they differ; what else differs between the receipts is listed.
    """
    then = _read_receipt(receipt)
    if output is not None:
        check(output)
    with connect(address, timeout_s, token_file) as client:
        [picture] = _draw(client, then.prompt, then.request_fields(), quiet=quiet)
    if output is not None:
        save(output, picture.png)
    same = picture.receipt.rgb_sha256 == then.rgb_sha256
    verdict = ["same" if same else "different", *(f"  {line}" for line in then.differences(picture.receipt))]
    click.echo("\n".join(verdict), err=output == STDOUT)
    return 0 if same else DIFFERS


def paths(output: Path, receipt: Path | None, index: int | None) -> tuple[Path, Path | None]:
    """Return the picture's and the receipt's file; `index` goes before the suffix, None when there is one picture.

    A picture on standard output has no receipt file unless one is named.
    """
    if output == STDOUT:
        return output, receipt
    if index is not None:
        output = output.with_stem(f"{output.stem}-{index}")
        receipt = receipt and receipt.with_stem(f"{receipt.stem}-{index}")
    return output, receipt or output.with_name(f"{output.name}.receipt.json")


def _files(output: Path, receipt: Path | None, num_images: int) -> list[tuple[Path, Path | None]]:
    """Return the files of every picture. Raises InvalidRequest when one of them cannot be written."""
    if receipt == STDOUT:
        raise InvalidRequest([("receipt", "standard output is for the picture, a receipt needs a file")])
    if output == STDOUT and num_images > 1:
        raise InvalidRequest([("output", f"standard output takes one picture, not {num_images}")])
    files = [paths(output, receipt, index if num_images > 1 else None) for index in range(num_images)]
    for path in [path for both in files for path in both if path is not None]:
        check(path)
    return files


def _draw(client: Client, prompt: str, fields: GenerateFields, *, quiet: bool) -> Sequence[Picture]:
    with shown(quiet=quiet) as on_event:
        return client.generate(prompt, on_event=on_event, **fields)


def _write(picture: Picture, output: Path, receipt: Path | None) -> dict[str, Any]:
    """Write a picture and its receipt and return what there is to say about them."""
    save(output, picture.png)
    if receipt is not None:
        save(receipt, picture.receipt.to_json().encode())
    drawn = picture.receipt.diffusion
    return {
        "file": str(output),
        "receipt": receipt and str(receipt),
        "request_id": picture.receipt.request_id,
        "image_index": picture.image_index,
        "width": drawn.width,
        "height": drawn.height,
        "seed": drawn.seed,
        "rgb_sha256": picture.receipt.rgb_sha256,
        "times": asdict(picture.times),
    }


def _line(entry: dict[str, Any]) -> str:
    times = entry["times"]
    ar_s = times["ar_s"]
    dit_s = times["denoise_s"] + times["decode_s"] + times["encode_s"]
    what = f"{entry['file']}  {entry['width']}x{entry['height']}  seed {entry['seed']}"
    return f"{what}  tokens {ar_s:.1f} s, drawing {dit_s:.1f} s"


def _read_receipt(path: Path) -> Receipt:
    try:
        return Receipt.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidRequest([("receipt", f"cannot read {path}: {err}")]) from err
