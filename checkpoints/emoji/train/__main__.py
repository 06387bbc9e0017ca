"""Translate: one command a stage, and one for all of them in order.

    python -m checkpoints.emoji.train all                        # everything, into build/emoji and checkpoints/emoji
    python -m checkpoints.emoji.train llm --device cuda          # one stage: data, vae, llm, dit, export
    python -m checkpoints.emoji.train all --smoke --work /tmp/x --out /tmp/y

A stage that has its result in the work folder does nothing; one that was stopped goes on from its last saved state.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from checkpoints.emoji.train import data, dit, export, llm, recipe, vae

STAGES = ("data", "vae", "llm", "dit", "export")
SMOKE_PICTURES = 6


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.emoji.train", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, default=Path("build/emoji"), help="folder of the data and of all results")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/emoji"), help="folder of the checkpoint")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of the stages that train, instead of the recipe's")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few pictures: does everything run?")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    for stage in STAGES if args.stage == "all" else (args.stage,):
        _run(stage, args)


def _run(stage: str, args: argparse.Namespace) -> None:
    match stage:
        case "data":
            data.prepare(args.work)
        case "export":
            export.run(args.work, args.out)
        case _:
            _train(stage, args)


def _train(stage: str, args: argparse.Namespace) -> None:
    plan = (recipe.SMOKE if args.smoke else recipe.FULL)[stage]
    plan = replace(plan, steps=args.steps or plan.steps)
    limit, compiled = (SMOKE_PICTURES if args.smoke else None), args.device == "cuda" and not args.smoke
    match stage:
        case "vae":
            vae.run(args.work, plan, args.device, limit)
        case "llm":
            llm.run(args.work, plan, args.device, limit, compiled=compiled)
        case "dit":
            dit.run(args.work, plan, args.device, limit, compiled=compiled)


if __name__ == "__main__":
    main()
