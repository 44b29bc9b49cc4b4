"""Handlers for the CPU as object code: taken from Numba once, loaded again without it.

Loading needs only llvmlite (some 20 ms to import), not Numba (some 400). Code that calls anything
but this process's C and math library is not stored: only Numba could load it.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import struct
from typing import Any

from ringmem.native.locks import Lock

__all__ = ["ENTRY", "cpu_name", "extract", "load"]

ENTRY = "ringmem_handler"
_names = itertools.count()
_names_lock = Lock()  # without a GIL two threads may get the same number


def cpu_name() -> str:
    """Return what tells one CPU's code from another's: architecture, model and features."""
    words = [platform.machine()]
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in itertools.islice(file, 60):
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "flags", "Features", "CPU part"):
                    words.append(value.strip())
                if not line.strip():
                    break
    except OSError:
        words.append(platform.processor())
    return "|".join(words)


def extract(compiled: Any) -> bytes | None:
    """Return the object code of a Numba ``cfunc`` with `ENTRY` as its symbol, or None.

    None where the code needs symbols that only Numba provides.
    """
    import llvmlite.binding as llvm

    try:
        library = compiled._library
        native = compiled.native_name.removeprefix("cfunc.")
        module = llvm.parse_assembly(str(library._final_module))
        for function in module.functions:
            if not function.is_declaration and function.name != native:
                function.linkage = llvm.Linkage.internal  # removed where nobody calls it
        module.link_in(llvm.parse_assembly(_entry(native, len(compiled._sig.args))))
        module.get_function(native).linkage = llvm.Linkage.internal
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
            opt=3,
            reloc="static",
            codemodel="jitdefault",
            jit=True,
        )
        _optimize(llvm, module, machine)
        code: bytes = machine.emit_object(module)
    except (RuntimeError, AttributeError, ValueError, NameError):
        return None  # another Numba or llvmlite: it compiles each time
    return code if _is_self_contained(code) else None


def _entry(native: str, arguments: int) -> str:
    """LLVM assembly of `ENTRY`, which calls a function of Numba's own calling convention.

    That one returns what went wrong, and writes the result through its first pointer. What can go
    wrong was refused before; -1 stands for it.
    """
    kinds = ["ptr", "ptr", "ptr", "i32", "i32"][:arguments]
    formal = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(kinds))
    return f"""
declare i32 @"{native}"(ptr, ptr, {", ".join(kinds)})
define i32 @{ENTRY}({formal}) {{
  %result = alloca i32
  %exception = alloca ptr
  store i32 -1, ptr %result
  store ptr null, ptr %exception
  %wrong = call i32 @"{native}"(ptr %result, ptr %exception, {formal})
  %status = load i32, ptr %result
  ret i32 %status
}}
"""


def _optimize(llvm: Any, module: Any, machine: Any) -> None:
    """Inline the handler into its entry and drop the wrappers that Python would have called."""
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _is_self_contained(code: bytes) -> bool:
    process = ctypes.CDLL(None)
    return all(
        hasattr(process, name) and not name.startswith(("Py", "_Py", "numba"))
        for name in _undefined_symbols(code)
    )


def _undefined_symbols(code: bytes) -> list[str]:
    """Read an ELF64 object's symbol table (System V ABI, chapter 4)."""
    sections_at, entry, count = struct.unpack_from("<Q10xHH", code, 0x28)
    names = []
    for index in range(count):
        at = sections_at + index * entry
        kind, offset, nbytes, link = struct.unpack_from("<4xI16xQQI", code, at)
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = struct.unpack_from("<Q", code, sections_at + link * entry + 0x18)[0]
        for symbol in range(offset + 24, offset + nbytes, 24):  # the first is empty
            name, section = struct.unpack_from("<I2xH", code, symbol)
            if section == 0 and name:
                end = code.index(b"\0", strings + name)
                names.append(code[strings + name : end].decode())
    return names


def load(code: bytes) -> tuple[int, Any]:
    """Load object code; return the address of `ENTRY` and what keeps it in memory.

    Raises
    ------
    RuntimeError
        llvmlite refused it.
    """
    import llvmlite.binding as llvm

    if hasattr(llvm, "initialize_native_target"):
        try:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
        except RuntimeError:  # newer versions do it themselves, and say so
            pass
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    backing = llvm.parse_assembly("")
    with _names_lock:
        backing.name = f"ringmem_{next(_names)}"
    engine = llvm.create_mcjit_compiler(backing, machine)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(ENTRY)
    if not address:
        raise RuntimeError(f"the object code defines no {ENTRY}")
    return address, engine
