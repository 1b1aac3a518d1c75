"""Which matrices of a model are kept in another form than numbers of its dtype: as their file stores them, or quantised
while they are loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.config.engine import ModelConfig
from raylm.layers.dtypes import dtype_name
from raylm.layers.experts import ParallelExperts
from raylm.layers.slots import FP8_ROWS, MXFP4_PATCHES, BlockForm, ExpertBlocks, OrderedForm, PatchForm
from raylm.layers.weight import PLAIN, BlockWeight, Form, Forms, PatchedWeight, PlainWeight, ScaledWeight
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.models.check import quantises
from raylm.models.checkpoint import CheckpointTensor, FileTensor
from raylm.models.gguf_patched import patches_of
from raylm.models.names import BLOCKS, Stored, TensorNames, slot_name
from raylm.models.packed import MXFP4_BLOCKS
from raylm.models.quantised.joined import QuantisedTensor
from raylm.models.quantised.patched import form_of, patch_form
from raylm.models.quantised.repacked import FORMS, block_form, may_be_blocks
from raylm.models.quantised.scaled import is_scaled

if TYPE_CHECKING:
    from raylm.models.decoder import DecoderModel


_MATRIX_DIMS = 2
_LAYERS = "layers."
_HALF_BYTES = 2
"""Of a number, where products of FP8 have kernels."""
_EXPERTS = ".experts."
_EXPERT_MATRICES = {"gate_up_proj": ("gate", "up"), "down_proj": (None,)}
_PATCHED_MATRICES = 2
"""Of an expert whose matrices are in patches: gate and up are one."""
_FP8_UNIT = 16
"""Rows and columns of the smallest matrix that has kernels."""
HOPPER = torch.device("meta")
"""What stands for a GPU that has all kernels."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The forms of matrices by their names in the model, such as "layers.0.mlp.down_proj.weight"."""

    matrices: Mapping[str, Forms]
    linears: Form | None = None
    """The form of all linear layers within the model's layers that `matrices` does not name."""
    experts: PatchForm | None = None
    """The form of all experts within the model's layers whose matrices `matrices` does not name."""

    def forms(self, name: str) -> Forms:
        """A matrix's; PLAIN where it has the model's dtype."""
        return self.matrices.get(name, self.of_linears if name.startswith(_LAYERS) else PLAIN)

    def of_experts(self, path: str, num_experts: int) -> PatchForm | ExpertBlocks | None:
        """Of a layer's experts, which are called "`path`0." and so on. Patches: one form for all matrices. Blocks: one
        type for all gates, one for all ups, one for all downs. None for anything else."""
        others = self.experts if path.startswith(_LAYERS) else None
        found: defaultdict[str | None, set[Form | None]] = defaultdict(set)
        for number in range(num_experts):
            for name, shards in _EXPERT_MATRICES.items():
                whole = self.matrices.get(f"{path}{name}.weight", {None: others})  # a tensor of all experts
                forms = self.matrices.get(f"{path}{number}.{name}.weight", whole)
                for shard in shards:
                    found[shard].add(forms.get(None) or forms.get(shard))
        kinds = {form for forms in found.values() for form in forms}
        patches = {form for form in kinds if isinstance(form, PatchForm)}
        if patches:
            # Where forms differ only in rounding activations, no matrix of the layer's experts rounds them.
            alike = patches if len(patches) == 1 else {form.unrounded for form in patches}
            return alike.pop() if len(patches) == len(kinds) and len(alike) == 1 else None
        if any(len(forms) > 1 for forms in found.values()):
            return None
        (gate,), (up,), (down,) = found.values()
        if isinstance(gate, BlockForm) and isinstance(up, BlockForm) and isinstance(down, BlockForm):
            return ExpertBlocks(gate, up, down)
        return None

    @property
    def scales_rows(self) -> bool:
        """Whether linear layers are FP8 with a scale a row."""
        return self.linears == ops.CODES

    @property
    def rounds_rows(self) -> bool:
        """Whether products of linear layers in long steps have the rate of 8-bit numbers."""
        return self.scales_rows or (isinstance(self.linears, PatchForm) and self.linears.rounds_rows)

    @property
    def rounds_experts(self) -> bool:
        """The same of products of experts."""
        return self.experts is not None and self.experts.rounds_rows

    @property
    def linear_patches(self) -> PatchForm | None:
        """Of a linear layer that `matrices` does not name, whatever the order of its columns."""
        form = self.linears.patches if isinstance(self.linears, OrderedForm) else self.linears
        return form if isinstance(form, PatchForm) else None

    @property
    def patches_of_linears(self) -> list[str]:
        """The names of the patches that linear layers are in, each once."""
        named = (form for name, forms in self.matrices.items() if _EXPERTS not in name for form in forms.values())
        return sorted({str(form) for form in (self.linears, *named) if isinstance(form, PatchForm | OrderedForm)})

    @property
    def of_linears(self) -> Forms:
        """Of a linear layer that `matrices` does not name."""
        return PLAIN if self.linears is None else {None: self.linears}


AS_NUMBERS = Scheme({})
"""All matrices have the model's dtype."""
AS_FP8 = Scheme({}, linears=ops.CODES, experts=FP8_ROWS)
"""The linear layers within the layers are quantised while they are loaded, and experts where the device has kernels for
them. Embedding, head and routers have the model's dtype."""


def configured_scheme(arch: ArchConfig, dtype: torch.dtype, device: torch.device = HOPPER) -> Scheme:
    """What read_scheme finds, by the configuration alone, in a checkpoint whose matrices are all stored alike."""
    stored = arch.quantisation
    if stored is None or arch.transformers_config:
        return AS_NUMBERS
    if not stored.has_parts:
        return _with_kernels(Scheme({}, experts=MXFP4_PATCHES), dtype, device)
    if stored.scales_rows:
        return _with_kernels(AS_FP8, dtype, device)
    schemes = stored.schemes
    if len(schemes) > 1:  # some may differ in what becomes of activations alone
        schemes = tuple({replace(scheme, weights_only=True) for scheme in schemes})
    if len(schemes) != 1:
        return AS_NUMBERS
    (scheme,) = schemes
    form = form_of(scheme)
    specs = [layer.mlp for layer in arch.layers if isinstance(layer.mlp, ExpertsSpec)]
    # Columns of no whole groups are decoded.
    unit = form.group if form is not None and scheme.columns else 1
    is_whole = arch.hidden_size % unit == 0 and not any(spec.size % unit for spec in specs)
    if form is not None and scheme.ordered and scheme.columns:
        return _with_kernels(Scheme({}, linears=OrderedForm(form, b"")), dtype, device)
    return _with_kernels(Scheme({}, linears=form, experts=form if specs and is_whole else None), dtype, device)


def _with_kernels(scheme: Scheme, dtype: torch.dtype, device: torch.device) -> Scheme:
    """What of the scheme the device has kernels for, with activations of `dtype`."""
    linears, experts = scheme.linears, scheme.experts
    if linears == ops.CODES:
        is_half = dtype.itemsize == _HALF_BYTES
        has_kernels = is_half if device == HOPPER else has_fp8(device) and (device.type != "cuda" or is_half)
    else:
        form = scheme.linear_patches
        has_kernels = form is not None and ops.takes_patched(
            form.numbers, ops.PATCH_ROWS, ops.PATCH_COLUMNS, dtype, device
        )
    return replace(
        scheme,
        linears=linears if has_kernels else None,
        experts=experts if experts and has_expert_kernels(experts, dtype, device) else None,
    )


def wanted_scheme(arch: ArchConfig, config: ModelConfig, dtype: torch.dtype) -> Scheme:
    """The same of Hopper GPUs, as a configuration has it: linear layers may be quantised while they are loaded, or all
    be decoded."""
    if quantises(arch, config):
        return AS_FP8
    return configured_scheme(arch, dtype) if config.weights == "stored" else AS_NUMBERS


def has_expert_kernels(form: PatchForm, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has kernels for experts of that form, if they are not too many and their sizes fit."""
    return ops.takes_patched_experts(form.numbers, 1, ops.PATCH_ROWS, ops.PATCH_ROWS, dtype, device)


def has_fp8(device: torch.device) -> bool:
    """Whether the device has kernels for products of codes with a scale a row."""
    return ops.takes_scaled(_FP8_UNIT, _FP8_UNIT, device)


def may_repack(arch: ArchConfig, device: torch.device) -> bool:
    """Whether the device computes with blocks that weights which are quantised as the configuration says may be."""
    stored, like = arch.quantisation, torch.empty(0, device=device)
    if stored is None:
        return False
    if not stored.has_parts:  # GPT-OSS's experts
        return ops.block_kernels(like, MXFP4_BLOCKS.kind)
    return any(map(may_be_blocks, stored.schemes)) and _has_repacked(like)


def read_scheme(
    tensors: Iterable[FileTensor],
    stored: Stored,
    names: TensorNames,
    arch: ArchConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Scheme:
    """What of a checkpoint the device has kernels for that read it as it is, with activations of `dtype`."""
    like = torch.empty(0, dtype=dtype, device=device)
    matrices: defaultdict[str, dict[str | None, Form]] = defaultdict(dict)
    mxfp4 = _mxfp4_form(like) if names.packed else None
    repacked: list[tuple[str, str | None]] = []
    for tensor in tensors:
        name, shard = slot_name(tensor.name, stored.table, names.prefixes)
        if mxfp4 is not None and name.endswith(f".{BLOCKS}"):
            matrices[f"{name.removesuffix(BLOCKS)}weight"][shard] = mxfp4
        # Of GGUF files: those of all experts of a layer.
        are_blocks = isinstance(tensor, CheckpointTensor) and tensor.encoding.form is not None and _EXPERTS in name
        if len(tensor.shape) != _MATRIX_DIMS and not (are_blocks and len(tensor.shape) == _MATRIX_DIMS + 1):
            continue
        form = _form_of_parts(tensor, name, like) if isinstance(tensor, QuantisedTensor) else _form(tensor, name, like)
        # The loader norms the rows of such a head.
        if form is not None and not (arch.norm_head and name == "lm_head.weight"):
            matrices[name][shard] = form
        if isinstance(tensor, QuantisedTensor) and isinstance(form, BlockForm) and _EXPERTS in name:
            repacked.append((name, shard))
    _make_alike(matrices, repacked)
    return Scheme(matrices)


def _mxfp4_form(like: Tensor) -> PatchForm | BlockForm | None:
    """Of GPT-OSS's experts."""
    if has_expert_kernels(MXFP4_PATCHES, like.dtype, like.device):
        return MXFP4_PATCHES
    return MXFP4_BLOCKS if ops.block_kernels(like, MXFP4_BLOCKS.kind) else None


def _make_alike(matrices: Mapping[str, dict[str | None, Form]], repacked: Iterable[tuple[str, str | None]]) -> None:
    """Integers fit into larger blocks too: the same matrix of all experts of a layer gets the largest blocks that one
    of them needs."""
    alike: defaultdict[tuple[str, str, str | None], list[str]] = defaultdict(list)
    for name, shard in repacked:
        layer, _, of_expert = name.partition(_EXPERTS)
        alike[layer, of_expert.partition(".")[2], shard].append(name)
    for (*_, shard), names in alike.items():
        forms = [form for name in names if isinstance(form := matrices[name][shard], BlockForm)]
        largest = max(forms, key=lambda form: form.num_bytes)
        for name in names:
            matrices[name][shard] = largest


def _form_of_parts(tensor: QuantisedTensor, name: str, like: Tensor) -> Form | None:
    """The same of a weight that is stored in parts. On GPUs a head and an embedding are decoded."""
    rows, columns = tensor.shape
    if _EXPERTS in name:
        form = form_of(tensor.scheme)
        if form is None or not has_expert_kernels(form, like.dtype, like.device):
            return _repacked(tensor, like)
        found = patch_form(tensor, form)
        return None if isinstance(found, OrderedForm) else found
    if is_scaled(tensor):
        fits = name.startswith(_LAYERS) and ops.takes_scaled(rows, columns, like.device)
        return ops.CODES if fits else None
    # Some of the tensor may have to be read, so whether there are kernels is asked first.
    form = form_of(tensor.scheme)
    if form and name.startswith(_LAYERS) and ops.takes_patched(form.numbers, rows, columns, like.dtype, like.device):
        return patch_form(tensor, form)
    return _repacked(tensor, like)


def _repacked(tensor: QuantisedTensor, like: Tensor) -> BlockForm | None:
    blocks = block_form(tensor) if _has_repacked(like) else None
    return blocks if blocks is not None and ops.block_kernels(like, blocks.kind) else None


def _has_repacked(like: Tensor) -> bool:
    return any(ops.block_kernels(like, form.kind) for form in FORMS.values())


def _form(tensor: CheckpointTensor, name: str, like: Tensor) -> Form | None:
    """What the tensor is kept as; None for the type of `like`."""
    encoding = tensor.encoding
    if encoding.form is not None:
        return encoding.form if ops.block_kernels(like, encoding.form.kind) else _patches(tensor, name, like)
    is_half = encoding.dtype in (torch.bfloat16, torch.float16)
    return encoding.dtype if is_half and ops.takes_narrow_weights(like) else None


def _patches(tensor: CheckpointTensor, name: str, like: Tensor) -> PatchForm | None:
    """Of a GGUF file's blocks. A head and an embedding are decoded."""
    form = patches_of(tensor.encoding.form)
    if form is None or not name.startswith(_LAYERS):
        return None
    if _EXPERTS in name:
        return form if has_expert_kernels(form, like.dtype, like.device) else None
    rows, columns = tensor.shape
    return form if ops.takes_patched(form.numbers, rows, columns, like.dtype, like.device) else None


def stored_forms(model: DecoderModel) -> Counter[str]:
    """How many matrices of a model are kept in which form other than its dtype, by the forms' names."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, BlockWeight):
            found.update(form.name for form in module.forms)
        elif isinstance(module, PatchedWeight):
            found[str(module.kept_as)] += 1
        elif isinstance(module, PlainWeight) and module.values.dtype != model.dtype:
            found[dtype_name(module.values.dtype)] += 1
        elif isinstance(module, ParallelExperts) and module.form is not None:
            for name in _matrices_of_expert(module.form):
                found[name] += module.num_experts
        elif isinstance(module, ScaledWeight):
            found[f"{dtype_name(module.codes.dtype)} with a scale a row"] += 1
    return found


def not_kept(model: DecoderModel, scheme: Scheme) -> int:
    """How many matrices of a model have its dtype although the scheme has another form for them."""
    count = 0
    for name, module in model.named_modules():
        if isinstance(module, PlainWeight):
            count += module.values.dtype == model.dtype and bool(scheme.forms(name))
        elif isinstance(module, ParallelExperts) and module.form is None:
            form = scheme.of_experts(f"{name}.", module.num_experts)
            count += module.num_experts * len(_matrices_of_expert(form)) if form is not None else 0
    return count


def _matrices_of_expert(form: PatchForm | ExpertBlocks) -> list[str]:
    """The form of each matrix of an expert."""
    return [str(form)] * _PATCHED_MATRICES if isinstance(form, PatchForm) else [each.name for each in form]
