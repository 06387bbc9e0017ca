"""Do: the engine's fast path. It differs from the plain one in how rows step (`step`, `graphs`) and in what it hoists.

Rows of one picture size step together where a shape is known to be exact and measured to be faster; else one by one. A shape
whose step raises goes on with the plain path, and its pictures say so.

B rows, C caption tokens, D width.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from mammoth_dit import sampling
from mammoth_dit.engine import Drawing, Engine, Exactness, Prepared
from mammoth_dit.fast.attention import fastest
from mammoth_dit.fast.exactness import Exact
from mammoth_dit.fast.fallback import sharing
from mammoth_dit.fast.graphs import Graphs, Units
from mammoth_dit.fast.layout import BUCKET_TOKENS, UnitShape, units
from mammoth_dit.fast.modulation import vectors_NVD
from mammoth_dit.fast.ops import Ops, ReferenceOps
from mammoth_dit.fast.rows import Angles, Row, stream_of
from mammoth_dit.fast.step import Network
from mammoth_dit.fast.step_cache import StepCache
from mammoth_dit.fast.weights import Weights
from mammoth_dit.finishing import Finisher, Pending
from mammoth_dit.isolation import DeviceLost
from mammoth_dit.jobs import Job
from mammoth_dit.model.embeddings import patchify, unpatchify
from mammoth_dit.model.vae import ImageDecoder
from mammoth_dit.model.weights import Model
from mammoth_dit.sampling import Guidance, initial_noise, step_times
from mammoth_policy.steps import best_unit
from mammoth_wire.errors import ShapeTooLarge

__all__ = ["FastDrawing", "FastEngine", "Precision", "StepCaching"]

TYPICAL_TOKENS = 4096 + 208  # of a 1024 x 1024 picture: what the attention kernels are timed on
MAX_SCHEDULES = 16
UNIT_SIZES = (1, 2, 4, 8)
MAX_UNIT = max(UNIT_SIZES)
Precision = Literal["bf16", "fp8"]
StepCaching = Literal["off", "residual"]
Item = TypeVar("Item")

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class FastDrawing(Drawing):
    """Rows of equal step count, each of which could go on by itself."""

    rows: list[Row]

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        return self.rows[0].num_steps

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.rows[0].step


class FastEngine(Engine):
    """Steps rows through the fused network; everything else is the plain engine's."""

    def __init__(
        self,
        model: Model,
        *,
        exactness: Exactness = "strict",
        precision: Precision = "bf16",
        step_cache: StepCaching = "off",
        graphs: bool = True,
    ) -> None:
        """`precision` is that of the blocks' products, where bf16 means the model's own. `graphs` False runs operation by operation, as on the CPU.

        The blocks' matrices are laid out anew, the decoder is copied; nothing here keeps `model`'s own. Raises RuntimeError when
        no kernel fits the model.
        """
        super().__init__(model, exactness=exactness)
        config = self.config.transformer
        weights = Weights.of(self._transformer, config)
        self._weights = weights.quantized() if precision == "fp8" else weights
        if precision == "bf16":  # else the plain path's matrices are the only ones that are not quantized
            self._transformer = sharing(self._transformer, weights)
        self._model = replace(model, transformer=self._transformer, vae=None)
        self._multiple = BUCKET_TOKENS if self._weights.heads.has_spare else 1
        self._attention = fastest(self._weights.heads, TYPICAL_TOKENS, self.dtype, self.device)
        self.network = network = Network(
            self._weights, _ops(self.device, config.norm_eps, quantizes=precision == "fp8"), self._attention
        )
        on_gpu = self.device.type == "cuda"
        self._steps = Graphs(network, self.device) if graphs and on_gpu else Units(network, self.device)
        self._options = ["/fp8"] * (precision == "fp8") + ["/step-cache"] * (step_cache == "residual")
        self._cache = StepCache(network, self.device) if step_cache == "residual" else None
        self._exact = Exact(self._steps.step, exactness)
        self._angles = Angles(self.config.rotary, self._weights.heads, self.dtype, self.device)
        self._schedules: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()
        self._step_ms: dict[tuple[int, int], dict[int, float]] = {}
        self._ceilings: dict[tuple[int, int], int] = {}
        self._broken: set[UnitShape] = set()

    @property
    def kernels(self) -> str:
        return f"fast/{self._attention.name}" + "".join(self._options)

    @property
    def packages(self) -> Sequence[str]:
        return ("triton",) if self.device.type == "cuda" else ()

    def facts(self) -> dict[str, str]:
        """Return exact and inexact shapes, step times, and the graphs: `size xrows`, in words."""
        known = self.exact_units
        told = {
            "exact_units": ", ".join(str(shape) for shape, exact in known.items() if exact),
            "inexact_units": ", ".join(str(shape) for shape, exact in known.items() if not exact),
            "plain_units": ", ".join(str(shape) for shape in self._broken),
            "step_ms": ", ".join(
                f"{width}x{height} x{rows}: {ms:.1f}"
                for (height, width), table in self._step_ms.items()
                for rows, ms in table.items()
            ),
        }
        if self._cache is not None:
            told["reused_steps"] = f"{self._cache.num_reused} of {self._cache.num_steps}"
        if isinstance(self._steps, Graphs):
            told["graphs"] = f"{self._steps.num_graphs}, {self._steps.num_bytes} bytes"
        return {name: text for name, text in told.items() if text}

    @property
    def exact_units(self) -> Mapping[UnitShape, bool]:  # type: ignore[override]  # a mapping only read is covariant here
        return self._exact.known

    @property
    def step_ms(self) -> Mapping[tuple[int, int], Mapping[int, float]]:
        """Milliseconds of a guided step of each measured (height, width), by number of rows."""
        return self._step_ms

    def unit_size(self, size_px: tuple[int, int]) -> int:
        """Return how many rows of (height, width) step together: what was measured to be fastest, 1 until then."""
        return min(best_unit(self._step_ms.get(size_px, {})), self._ceilings.get(size_px, MAX_UNIT))

    def warm_up(self, sizes_px: Sequence[tuple[int, int]]) -> None:
        super().warm_up(sizes_px)
        if self.device.type == "cuda":
            for size_px in sizes_px:
                self.calibrate(size_px)

    def take_times(self, size_px: tuple[int, int], step_ms: Mapping[int, float]) -> None:
        """Decide units of (height, width) from these milliseconds of a step by number of rows."""
        self._step_ms[size_px] = dict(step_ms)

    def calibrate(self, size_px: tuple[int, int], unit_sizes: Sequence[int] = UNIT_SIZES) -> None:
        """Measure steps of units of a size, as far as they fit; from then on the fastest is used.

        A unit that is not exact runs row by row, and is measured so.
        """
        table: dict[int, float] = {}
        for size in unit_sizes:
            self.take_times(size_px, {1: float(size), size: 1.0})  # makes units of `size`
            try:
                table[size] = min(self.measure(*size_px, size))
            except ShapeTooLarge:
                self.release()
                break
        self.take_times(size_px, table)
        logger.info("step times", extra={"size_px": size_px, "ms": {size: round(ms, 2) for size, ms in table.items()}})

    @torch.inference_mode()
    def begin(self, rows: Sequence[Prepared]) -> FastDrawing:
        return FastDrawing([self._start(row) for row in rows])

    @torch.inference_mode()
    def advance(self, drawings: Sequence[Drawing]) -> None:
        rows = [row for drawing in drawings for row in _fast(drawing).rows]
        if not rows:
            return
        size_px = rows[0].prepared.job.key[:2]
        if self._cache is not None:
            rows = [row for row in rows if not self._reused(row)]
        for shape, unit in units(rows, [row.shape for row in rows], self.unit_size(size_px)):
            self._step(unit, replace(shape, batch=len(unit)))
            for row in unit:
                row.step += 1

    @torch.inference_mode()
    def latents(self, drawing: Drawing) -> Tensor:
        rows = _fast(drawing).rows
        tokens = torch.stack([row.x_nF for row in rows])
        return unpatchify(tokens, self.config.transformer.patch_size, *rows[0].grid)

    def finish(self, drawing: Drawing, row: int, denoise_s: float) -> Pending:
        pending = super().finish(drawing, row, denoise_s)
        if _fast(drawing).rows[row].plain is not None:
            pending.kernels = super().kernels
        return pending

    def _reused(self, row: Row) -> bool:
        """Take a row's step with the step cache; False where the cache has no part in it."""
        assert self._cache is not None
        if not self._cache.applies(row):
            return False
        self._cache.step(row)
        row.step += 1
        return True

    def _step(self, rows: Sequence[Row], shape: UnitShape) -> None:
        if shape not in self._broken:
            try:
                self._exact.step(rows, shape)
                return
            except torch.OutOfMemoryError:
                self._ceilings[rows[0].prepared.job.key[:2]] = max(1, len(rows) // 2)
                raise
            except RuntimeError as err:
                if not self.usable():
                    raise DeviceLost(f"the device answers no more: {err}") from err
                logger.error("a shape goes on with plain kernels", exc_info=err, extra={"shape": str(shape)})
                self._broken.add(shape)
        for row in rows:
            self._step_plain(row)

    def _step_plain(self, row: Row) -> None:
        """Take a row's step by the definition."""
        if row.plain is None:
            row.plain = self.group([row.prepared])
        patch = self.config.transformer.patch_size
        x = unpatchify(row.x_nF[None], patch, *row.grid)
        group = row.plain
        x = sampling.advance(x, group.schedule, row.step, group.conditional, group.unconditional)
        row.x_nF.copy_(patchify(x, patch)[0])

    def _split(self, items: Sequence[Item], size_px: tuple[int, int]) -> list[list[Item]]:
        size = self.unit_size(size_px)
        return [list(items[start : start + size]) for start in range(0, len(items), size)]

    def _finishing(self, vae: ImageDecoder) -> Finisher:
        if self.device.type != "cuda":
            return super()._finishing(vae)
        from mammoth_dit.fast.decoder import FastFinisher  # Triton is only where a GPU is

        return FastFinisher(vae, self.device)

    def release(self) -> None:
        if isinstance(self._steps, Graphs):
            self._steps.clear()
        super().release()

    def _start(self, prepared: Prepared) -> Row:
        job, dit = prepared.job, self.config.transformer
        params = job.params
        size_px = (params.height, params.width)
        grid = (params.height // dit.side_multiple_px, params.width // dit.side_multiple_px)
        times = step_times(params.steps, size_px)
        guidance = Guidance(params.guidance, params.cfg_range)
        noise = initial_noise(job.seed, dit.in_channels, size_px, self.dtype)
        scale = torch.tensor(guidance.scale, dtype=torch.promote_types(torch.float32, self.dtype))
        width, multiple = self._weights.width, self._multiple
        return Row(
            prepared=prepared,
            grid=grid,
            x_nF=patchify(noise, dit.patch_size)[0].to(self.device),
            conditional=stream_of(prepared.caption_CD, grid, self._angles, width=width, multiple=multiple),
            unconditional=stream_of(prepared.unconditional_UD, grid, self._angles, width=width, multiple=multiple),
            vectors_NVD=self._vectors(times, job),
            dt_N=times.diff().to(self.device, self.dtype),
            scale=scale.to(self.device),
            guided=tuple(guidance.active(step, params.steps) for step in range(params.steps)),
        )

    def _vectors(self, times: Tensor, job: Job) -> Tensor:
        """Return the modulation of a schedule, which is that of (height, width, steps); recent ones are kept."""
        vectors = self._schedules.pop(job.key, None)
        if vectors is None:
            vectors = vectors_NVD(self._transformer, times[:-1].to(self.device, self.dtype))
        self._schedules[job.key] = vectors
        if len(self._schedules) > MAX_SCHEDULES:
            self._schedules.popitem(last=False)
        return vectors


def _fast(drawing: Drawing) -> FastDrawing:
    assert isinstance(drawing, FastDrawing)
    return drawing


def _ops(device: torch.device, eps: float, *, quantizes: bool) -> Ops:
    if device.type != "cuda":
        return ReferenceOps(eps, quantizes=quantizes)
    from mammoth_dit.fast.kernels import TritonOps  # Triton is only where a GPU is

    return TritonOps(eps, quantizes=quantizes)
