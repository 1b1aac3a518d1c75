"""Writes the header that has wgmma's instruction for each type and width: its operands are written out one by one.

python wgmma_forms.py HEADER
"""

import sys
from pathlib import Path

TYPES = {"__half": "f16", "__nv_bfloat16": "bf16"}
CODES = {"__nv_fp8_e4m3": "e4m3"}
"""Of 8 bits, for products whose left side lies in shared memory: the summed dimension is innermost in both."""
CODES_SHARED = (48, 64, 96, 112, 128)
SHARED = (8, 16, 32, 48, 64, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
"""Widths of products whose left side lies in shared memory."""
REGISTERS = (64, 80, 96, 128, 192, 256)
"""Widths of those whose left side lies in registers."""
REGISTERS_TRANSPOSED = (8, 16, 32, 64, 128, 256)
"""Of these, widths of products with a transpose: the summed dimension is innermost on the right side too."""
BYTES = {
    "signed char": ("int32_t", "s32.s8.s8", "", (8, 16, 32, 64, 128, 256)),
    "__nv_fp8_e4m3": ("float", "f32.e4m3.e4m3", ", 1, 1", (8, 16, 32, 64)),
}
"""Such products of numbers of 8 bits: what sums are, the kinds, flags and widths."""


def names(first, count):
    """Operands as the instruction's text names them."""
    return ", ".join(f"%{number}" for number in range(first, first + count))


def form(signature, width, kinds, left, operands, accumulates, flags, depth=16):
    """One specialisation. `kinds`: of sums and of both sides; `left`: how the text names the left side; `operands`: C
    expressions after the sums."""
    sums = width // 2
    register = "r" if kinds.startswith("s32") else "f"
    outputs = ", ".join(f'"+{register}"(c[{number}])' for number in range(sums))
    last = sums + len(operands) - 1
    condition = f"%{last}" if accumulates else "1"
    right = f"%{last - 1}" if accumulates else f"%{last}"
    lines = [
        "template <>",
        f"__device__ __forceinline__ void {signature} {{",
        '  asm volatile("{\\n.reg .pred p;\\n"',
        f'               "setp.ne.b32 p, {condition}, 0;\\n"',
        f'               "wgmma.mma_async.sync.aligned.m64n{width}k{depth}.{kinds} "',
        f'               "{{{names(0, sums)}}}, "',
        f'               "{left}, {right}, p{flags};\\n}}"',
        f"               : {outputs}",
        f"               : {', '.join(operands)});",
        "}",
    ]
    return "\n".join(lines) + "\n"


def shared(name, kind, width, flags, depth=16):
    """That of a product whose sides both lie in shared memory."""
    sums = width // 2
    signature = f"multiply_transposed<{name}, {width}>(float (&c)[{sums}], uint64_t a, uint64_t b, int accumulate)"
    operands = ['"l"(a)', '"l"(b)', '"r"(accumulate)']
    return form(signature, width, f"f32.{kind}.{kind}", f"%{sums}", operands, True, f", {flags}", depth)


def registers(function, name, kind, width, flags):
    """That of a product whose left side lies in registers."""
    sums = width // 2
    signature = f"{function}<{name}, {width}>(float (&c)[{sums}], const uint32_t* a, uint64_t b)"
    operands = [*(f'"r"(a[{number}])' for number in range(4)), '"l"(b)']
    return form(signature, width, f"f32.{kind}.{kind}", f"{{{names(sums, 4)}}}", operands, False, f", {flags}")


def of_bytes(name, of_sums, kinds, flags, width):
    """That of a product of numbers of 8 bits whose left side lies in registers."""
    sums = width // 2
    arguments = f"{of_sums} (&c)[{sums}], const uint32_t* a, uint64_t b, int accumulate"
    signature = f"multiply_bytes<{name}, {width}>({arguments})"
    operands = [*(f'"r"(a[{number}])' for number in range(4)), '"l"(b)', '"r"(accumulate)']
    return form(signature, width, kinds, f"{{{names(sums, 4)}}}", operands, True, flags, depth=32)


def header():
    """The header's text."""
    forms = []
    for name, kind in TYPES.items():
        for width in SHARED:
            forms.append(shared(name, kind, width, "1, 1, 0, 0"))
        for width in REGISTERS:
            forms.append(registers("multiply", name, kind, width, "1, 1, 1"))
        for width in REGISTERS_TRANSPOSED:
            forms.append(registers("multiply_by_transpose", name, kind, width, "1, 1, 0"))
    for name, kind in CODES.items():
        for width in CODES_SHARED:
            forms.append(shared(name, kind, width, "1, 1", depth=32))
    for name, (of_sums, kinds, flags, widths) in BYTES.items():
        forms += [of_bytes(name, of_sums, kinds, flags, width) for width in widths]
    begin = "// Written by cmake/wgmma_forms.py.\n#pragma once\n\nnamespace raylm::cuda {\n"
    return "\n".join([begin, *forms, "}  // namespace raylm::cuda\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(header())
