"""What must hold of a kernel that calls a library. Floor 3."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnknownNameError
from ..registry.library_calls import LibraryCall
from ..spec import KernelSpec
from .names import Problems

#: What a kernel's template is given: of a library's call it would say nothing.
_OF_TEMPLATES = (
    "template", "params", "valid", "constants", "specialize", "regions", "grid", "block", "cluster", "shared_memory",
    "cooperative", "programmatic", "tensor_maps", "min_blocks", "max_registers", "simulator",
)  # fmt: skip


def check_library(problems: Problems, spec: KernelSpec, known: Mapping[str, LibraryCall]) -> LibraryCall | None:
    """The call that the kernel names; None after what is wrong is noted."""
    for field in _OF_TEMPLATES:
        if getattr(spec, field) != KernelSpec.model_fields[field].default:
            problems.add(field, f"it stands beside library = {spec.library!r}", "a template, or a library's call alone")
    found = known.get(spec.library)
    if found is None:
        hint = UnknownNameError.among("library call", spec.library, known).expected if known else "there is none"
        problems.add("library", f"unknown library call {spec.library!r}", hint, "register_library_calls names them")
    return found
