"""WeightLoader: from the tensors of a checkpoint to the parameters of a model, every one exactly once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import (
    FP8_FORMS,
    INT8_ROWS,
    MXFP4_PATCHES,
    MXFP8_PATCHES,
    BlockForm,
    PatchForm,
    Slot,
    SlotName,
)
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.models.checkpoint import CheckpointTensor, FileTensor, MXFP4Tensor, Source, TransposedTensor, every
from raylm.models.filling import Filler, fill
from raylm.models.gguf_patched import BlocksInPatches, patches_of
from raylm.models.mxfp4 import BYTES
from raylm.models.names import BLOCKS, SCALES, Stored, TensorNames, slot_name
from raylm.models.packed import MXFP4InBlocks, PackedTensor
from raylm.models.quantised.join import drop_zero_biases
from raylm.models.quantised.joined import QuantisedTensor
from raylm.models.quantised.patched import PatchedTensor, form_of
from raylm.models.quantised.repacked import RepackedTensor
from raylm.models.quantised.scaled import ScaledTensor, is_scaled
from raylm.models.read_gguf import ROPE_FACTORS
from raylm.parallel.context import ParallelContext

_MAX_NAMES = 8
"""Names that one error lists."""
_DUMMY_STD = 0.02
_DUMMY_ROWS = 1024
"""Of codes that are drawn at a time."""
_DUMMY_EXPONENT = 120
"""2 ** -7: MXFP4's codes have a deviation of 2.9."""


class Fillable(Protocol):
    """A model as loading sees it; DecoderModel says what each part means."""

    @property
    def arch(self) -> ArchConfig: ...

    @property
    def context(self) -> ParallelContext: ...

    def slots(self) -> dict[SlotName, Slot]: ...

    def is_elsewhere(self, parameter: str) -> bool: ...


class WeightLoader:
    """Fills one model. Which tensor goes where is settled, and proved complete, before any data is read."""

    def __init__(self, model: Fillable, names: TensorNames, *, progress: bool, filled: tuple[str, ...] = ()) -> None:
        """`filled`: parameters that have their values already."""
        self._model = model
        self._names = names
        self._progress = progress
        self._filled = filled

    def load(self, tensors: Iterable[FileTensor], stored: Stored) -> Counter[str]:
        """Read a checkpoint into the model. Returns how many matrices in blocks of a GGUF file were decoded, by the
        names of the blocks' types.

        Raises ConfigError naming tensors that are missing, have no place, come twice or have another shape.
        """
        jobs = self._assign(tensors, stored)
        fill(jobs, progress=self._progress)
        blocks = (
            each.encoding.form for each, slot in jobs if isinstance(each, CheckpointTensor) and slot.scales is None
        )
        return Counter(form.name for form in blocks if form is not None)

    def _assign(self, tensors: Iterable[FileTensor], stored: Stored) -> list[tuple[Filler, Slot]]:
        slots = {name: slot for name, slot in self._model.slots().items() if name[0] not in self._filled}
        found: defaultdict[SlotName, list[Source]] = defaultdict(list)
        for tensor in tensors:
            if tensor.name not in ROPE_FACTORS and not self._names.is_ignored(tensor.name):
                name = slot_name(tensor.name, stored.table, self._names.prefixes)
                for each, part in self._by_experts(name, tensor):
                    found[each].append(self._turned(part))
        if self._names.packed:
            _join_packed(found)
        self._split_fused(found, slots)
        if self._model.arch.tie_embeddings:
            # Some checkpoints carry the tied head as well; it is the embedding once more.
            found.pop(("lm_head.weight", None), None)
        for name in [name for name in found if name not in slots and self._model.is_elsewhere(name[0])]:
            del found[name]
        if self._model.arch.quantisation is not None:
            drop_zero_biases(found, slots)
        for name in found.keys() & slots.keys():
            found[name] = [_as_taken(tensor, slots[name]) for tensor in found[name]]
        problems = {
            "missing": [_label(name) for name in slots if name not in found],
            "without a place in this model": [t.name for name, ts in found.items() if name not in slots for t in ts],
            "there twice": [t.name for ts in found.values() if len(ts) > 1 for t in ts],
            "of another shape": [
                f"{tensor.name} {tensor.shape}, not {slots[name].shape}"
                for name, (tensor, *_) in found.items()
                if name in slots and tensor.shape != slots[name].shape
            ],
        }
        _raise(self._model.arch.architecture, problems)
        taken = ((slot, self._rearranged(name, found[name][0], stored.pairs)) for name, slot in slots.items())
        return [(_in_codes(tensor) if slot.scales is not None else tensor, slot) for slot, tensor in taken]

    def _by_experts(self, name: SlotName, tensor: FileTensor) -> Iterator[tuple[SlotName, FileTensor]]:
        """Of a tensor of all experts of a layer, one for each."""
        before, experts, after = name[0].partition(".experts.")
        is_of_one = not experts or after.partition(".")[0].isdigit()
        mlps = (layer.mlp for layer in self._model.arch.layers)
        counts = {mlp.num_experts for mlp in mlps if isinstance(mlp, ExpertsSpec)}
        if is_of_one or not isinstance(tensor, CheckpointTensor) or not tensor.shape or tensor.shape[0] not in counts:
            yield name, tensor
            return
        for number in range(tensor.shape[0]):
            yield (f"{before}.experts.{number}.{after}", name[1]), tensor.item(number)

    def _turned(self, tensor: FileTensor) -> Source:
        if not isinstance(tensor, CheckpointTensor):
            return tensor  # whoever quantised it wrote [out, in]
        if len(tensor.shape) == 2 and set(tensor.name.split(".")) & set(self._names.transposed):
            return TransposedTensor(tensor, 0, tensor.shape[1])
        return tensor

    def _split_fused(self, found: dict[SlotName, list[Source]], slots: dict[SlotName, Slot]) -> None:
        """A tensor of a whole parameter that is filled shard by shard holds the shards one behind the other, or
        queries, keys and values by heads of keys."""
        for name in [name for name in found if name not in slots and name[1] is None]:
            shards = [shard for shard in slots if shard[0] == name[0]]
            sizes = [slots[shard].shape[0] for shard in shards]
            if not shards or any(tensor.shape[0] != sum(sizes) for tensor in found[name]):
                continue
            groups = self._model.arch.num_kv_heads if self._names.qkv_groups and shards[0][1] == "q" else 1
            for tensor in found.pop(name):
                if self._names.gate_up_turns and shards[0][1] == "gate":
                    for number, shard in enumerate(shards):
                        found.setdefault(shard, []).append(
                            every(tensor, len(shards), first=number, count=sizes[number])
                        )
                    continue
                first = 0
                for shard, size in zip(shards, sizes, strict=True):
                    runs = (size // groups, sum(sizes) // groups) if groups > 1 else None
                    found.setdefault(shard, []).append(tensor.rows(first, size, runs))
                    first += size // groups

    def _rearranged(self, name: SlotName, tensor: Source, pairs: bool) -> Source:
        """The tensor in this package's order."""
        arch, (parameter, shard) = self._model.arch, name
        if pairs and (shard in ("q", "k") or parameter.endswith(("q_norm.weight", "k_norm.weight"))):
            rope = next(layer.rope for layer in arch.layers if layer.rope is not None)
            rotated, head_dim = rope.size(arch.head_dim), arch.head_dim
            is_of_rows = shard is not None or len(tensor.shape) == 1
            restore = partial(_pair_halves, head_dim=head_dim, rotated=rotated, dim=0 if is_of_rows else 1)
            return tensor.rearranged(restore, row_unit=head_dim if is_of_rows else 1)
        if arch.norm_head and parameter == "lm_head.weight":
            return tensor.rearranged(lambda piece: F.normalize(piece.float()))
        return tensor


def fill_dummy(model: Fillable, *, seed: int) -> None:
    """Random weights: norms 1, integers 0, everything else normal with a deviation of 0.02, the same for the same seed
    and rank. They are quantised where the model's weights are."""
    context = model.context
    generator = torch.Generator(context.device).manual_seed(seed + context.rank)
    for (name, _), slot in model.slots().items():
        if name.endswith("norm.weight"):
            slot.destination.fill_(1.0)
        elif slot.scales is not None:
            values = torch.empty(slot.destination.shape, dtype=torch.float32, device=context.device)
            slot.put(0, values.normal_(std=_DUMMY_STD, generator=generator))
        elif isinstance(slot.form, PatchForm):
            for patches in slot.destination.split(_DUMMY_ROWS // ops.PATCH_ROWS):
                patches.copy_(_dummy_patches(patches, slot.form, generator))
        elif not slot.destination.is_floating_point():
            slot.destination.zero_()
        else:
            slot.destination.normal_(std=_DUMMY_STD, generator=generator)


def _dummy_patches(like: torch.Tensor, form: PatchForm, generator: torch.Generator) -> torch.Tensor:
    """Random codes, and scales by which numbers have about the deviation of others."""
    rows, columns = len(like) * ops.PATCH_ROWS, like.shape[1] // form.patch_bytes * ops.PATCH_COLUMNS
    shape, device = (rows, columns), like.device
    if form in (*FP8_FORMS, MXFP8_PATCHES):
        values = torch.empty(shape, device=device).normal_(std=_DUMMY_STD, generator=generator)
        if form in FP8_FORMS:
            return ops.quantise_fp8(values)
        exponents = torch.full((rows, columns // form.group), _DUMMY_EXPONENT, dtype=torch.uint8, device=device)
        return ops.pack_mxfp8((values * 2.0 ** (127 - _DUMMY_EXPONENT)).to(ops.CODES), exponents)
    most = ops.MOST_CODE.get(form.numbers, 15) + 1
    codes, zeros = (
        torch.randint(0, most, (rows, size), generator=generator, device=device, dtype=torch.uint8)
        for size in (columns, columns // form.group)
    )
    if form == MXFP4_PATCHES:
        return ops.pack_mxfp4(codes, torch.full_like(zeros, _DUMMY_EXPONENT))
    uniform = torch.rand(zeros.shape, generator=generator, device=device) * _DUMMY_STD
    if form.numbers == "nf4":
        # The table's mean is not 0: by its sign alone every token would go to the same experts.
        signs = torch.randint(0, 2, zeros.shape, generator=generator, device=device) * 2 - 1
        return ops.pack_nf4(codes, 3 * signs * uniform, form.group)
    scales = uniform * 4 / most
    if form == INT8_ROWS:
        scales, zeros = scales[:, :1].expand(zeros.shape), zeros.fill_(most // 2)
    if form.numbers in ops.MOST_ZERO:
        return ops.pack_integers(form.numbers, codes, scales, zeros, form.group)
    return ops.pack_affine(form.numbers, codes, scales, -scales * zeros, form.group)


def _join_packed(found: dict[SlotName, list[Source]]) -> None:
    """Blocks and scales of an MXFP4 weight become that weight. Raises ConfigError where they do not fit together."""
    for name in [name for name in found if name[0].endswith(f".{BLOCKS}")]:
        path, shard = name[0].removesuffix(BLOCKS), name[1]
        scales_name = f"{path}{SCALES}", shard
        if len(found[name]) != len(found.get(scales_name, ())):
            continue
        for blocks, scales in zip(found.pop(name), found.pop(scales_name), strict=True):
            assert isinstance(blocks, CheckpointTensor) and isinstance(scales, CheckpointTensor)
            if len(scales.shape) != 2 or blocks.shape != (*scales.shape, BYTES):
                raise ConfigError(
                    f"{blocks.path}: {blocks.name} has blocks of shape {blocks.shape}, and {scales.name} scales of "
                    f"shape {scales.shape}, an expert; allowed: [N, G, {BYTES}] and [N, G]"
                )
            joined = MXFP4Tensor(blocks.flat(), scales)
            found.setdefault((f"{path}weight", shard), []).append(joined)


def _as_taken(tensor: Source, slot: Slot) -> Filler:
    """The tensor as its slot takes it."""
    if isinstance(tensor, QuantisedTensor) and isinstance(slot.form, BlockForm):
        return RepackedTensor(tensor, slot.form)
    if isinstance(tensor, MXFP4Tensor) and isinstance(slot.form, BlockForm):
        return MXFP4InBlocks(tensor)
    if isinstance(slot.form, PatchForm):
        if isinstance(tensor, CheckpointTensor) and patches_of(tensor.encoding.form) == slot.form:
            return BlocksInPatches(tensor)
        # A weight of integers has been looked at when the form was chosen: that reads its zero points.
        if isinstance(tensor, QuantisedTensor):
            stored = form_of(tensor.scheme)
            if stored is not None and slot.form in (stored, stored.unrounded):
                return PatchedTensor(tensor, slot.form)
        return PackedTensor(tensor, slot.form)
    if not isinstance(tensor, CheckpointTensor):
        return tensor
    if slot.form is not None and slot.form == tensor.encoding.form:
        return tensor.in_blocks()
    # GGUF files have no dimensions of 1: a vector may be a matrix of one row.
    return replace(tensor, shape=slot.shape) if (1, *tensor.shape) == slot.shape else tensor


def _in_codes(tensor: Source) -> Filler:
    """The tensor with codes and scales as its file has them; other tensors are quantised by their slot."""
    return ScaledTensor(tensor) if isinstance(tensor, QuantisedTensor) and is_scaled(tensor) else tensor


def _pair_halves(piece: torch.Tensor, *, head_dim: int, rotated: int, dim: int) -> torch.Tensor:
    """Whole heads along `dim`: the rotated dimensions from neighbouring pairs to first and second half."""
    heads = piece.unflatten(dim, (-1, head_dim))
    pairs, rest = heads.split((rotated, head_dim - rotated), dim=dim + 1)
    halves = pairs.unflatten(dim + 1, (-1, 2)).transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 2)
    return torch.cat((halves, rest), dim=dim + 1).flatten(dim, dim + 1)


def _label(name: SlotName) -> str:
    parameter, shard = name
    return parameter if shard is None else f"{parameter} (shard {shard})"


def _raise(architecture: str, problems: dict[str, list[str]]) -> None:
    texts = []
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            texts.append(f"{len(names)} {what}: {', '.join(names[:_MAX_NAMES])}{more}")
    if texts:
        raise ConfigError(f"the checkpoint's tensors do not fit {architecture}: {'; '.join(texts)}")
