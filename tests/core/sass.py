"""Reads of uniform registers that no instruction has written on some path to them, in the machine code of a kernel.

nvdisasm, which Triton ships, prints the code; an instruction's operands name what it reads and writes.
"""

import re
import subprocess
import tempfile
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*(?:/\*.*)?$")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):\s*$")
_GUARD = re.compile(r"^@!?(U?P\w+)\s+(.*)$")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_TARGET = re.compile(r"\.L_x_\d+")
# Instructions on uniform registers alone, and others whose first operand is one that they write.
_ARITHMETIC = {"UIADD3", "UIMAD", "ULEA", "ULOP3", "UMOV", "UPRMT", "USEL", "USHF", "UFLO", "UPOPC", "USGXT"}
_WRITES = _ARITHMETIC | {"ULDC", "S2UR", "R2UR", "VOTEU", "REDUX", "CS2UR"}


def unwritten(cubin):
    """[(instruction, registers)], of which each is read before it is written."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    effects = [_effect(line) for line in code]
    written, left = {0: frozenset()}, [0]
    while left:
        place = left.pop()
        after = written[place] | effects[place][1]
        for other in _next(code, labels, place):
            both = after & written.get(other, after)
            if other not in written or both != written[other]:
                written[other] = both
                left.append(other)
    found = [(code[place], sorted(effects[place][0] - before)) for place, before in written.items()]
    return [(line, registers) for line, registers in found if registers]


def _effect(line):
    """(registers that an instruction reads, those that it writes)."""
    guard = _GUARD.match(line)
    operation, _, rest = (guard[2] if guard else line).partition(" ")
    name, *modifiers = operation.split(".")
    operands = [operand.strip() for operand in rest.split(",")]
    wide = bool({"64", "WIDE"} & set(modifiers))
    writes, reads = set(), set()
    if name in _WRITES and (target := _UNIFORM.fullmatch(operands[0])):
        writes = {int(target[1]) + i for i in range(1 + wide)}
        operands = operands[1:]
    for operand in operands:
        if name == "HGMMA" and "gdesc" in operand:
            # Four registers: A's descriptor, which is not read where A is in registers, and B's.
            first = int(_UNIFORM.search(operand)[1])
            reads |= set(range(first + 2 * bool(re.fullmatch(r"R\d+(\.reuse)?", operands[1])), first + 4))
            continue
        for register in _UNIFORM.finditer(operand):
            pair = "desc[" in operand or "64" in modifiers and name in _ARITHMETIC
            reads |= {int(register[1]) + i for i in range(1 + pair)}
    return reads, frozenset(writes)


def _next(code, labels, place):
    """Where execution may go on."""
    guard = _GUARD.match(code[place])
    name = (guard[2] if guard else code[place]).split(" ")[0].split(".")[0]
    targets = [labels[label] for label in _TARGET.findall(code[place])] if name in ("BRA", "BRX", "CALL") else []
    if name not in ("BRA", "BRX", "EXIT", "RET") or guard:
        targets.append(place + 1)
    elif name == "BRA" and re.search(r"BRA\S* !?U?P\d", code[place]):
        targets.append(place + 1)
    return [target for target in targets if target < len(code)]
