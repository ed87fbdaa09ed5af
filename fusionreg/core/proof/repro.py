"""``fusionreg repro``: one conformance case as a folder that replays it without the plugin. Floor 7.

``case.json`` holds everything but the arrays and the unit's text. It is written and read by Python's ``json``, which
spells infinities and NaN as JavaScript does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from ..cache import Cache
from ..compiler import compile_source
from ..conformance import derive, executor_for
from ..conformance.execute import Job, Mutate, execute, prepare
from ..conformance.reference import Reference, reference
from ..conformance.runner import on_facts
from ..conformance.trial import Trial, arrange
from ..dtypes import dtype
from ..errors import ArgumentError, CompileError, MissingDependencyError, UnknownNameError
from ..frozen import EMPTY, FrozenDict
from ..ops import default_vocabulary
from ..problem import Candidate, Problem, TensorMapLayout
from ..registry.entries import FusionEntry, KernelEntry
from ..render import KernelSource, Launch
from ..render.prelude import Argument
from ..spec import FusionSpec
from ..targets import SHIPPED
from .report import Evaluation, Status, environment
from .units import first_units

if TYPE_CHECKING:
    from ..registry.catalog import Catalog

FORMAT = 1
REFERENCES = ("exact", "chain", "allowed")

RUN = '''\
"""Replays {key}, case {case!r}: python run.py [--device sim|cuda]

Needs fusionreg, not the plugin. kernel.cu may be edited: it is compiled as it is.
Exit status: 0 it passes, 1 it fails, 2 it could not run.
"""

import argparse
import sys
from pathlib import Path

from fusionreg.core.errors import FusionregError
from fusionreg.core.proof.repro import replay

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", choices=("sim", "cuda"), default={device!r})
try:
    found = replay(Path(__file__).parent, parser.parse_args().device)
except FusionregError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(2)
print(found)
print(f"max abs {{found.max_abs:.3g}}, max rel {{found.max_rel:.3g}} on {{found.device}}")
sys.exit({{"PASSED": 0, "SKIPPED_UNSUPPORTED": 2}}.get(found.status, 1))
'''


def write(
    catalog: Catalog,
    fusion: str,
    kernel: str,
    case: str,
    *,
    device: str = "sim",
    folder: Path,
    mutate: Mutate | None = None,
) -> Path:
    """Executes one case and writes what is needed to execute it again; returns the folder.

    Args:
        kernel: its name, or ``fusion/kernel``.
        case: a conformance case, or ``compile DTYPES ARCH``: as ``fusionreg run`` prints it, alone or whole.
        device: ``sim``, ``cuda`` or ``auto``.
        folder: must not exist, or be empty; it appears at once with all its files.
        mutate: changes the rendered unit, as in :func:`conformance.run`.

    Raises:
        UnknownNameError: no such fusion, kernel or case.
        ArgumentError: the folder holds something, or the kernel does not run this case at all.
    """
    entry = catalog[fusion]
    chosen = entry.kernel(kernel)
    if chosen.library is not None:
        raise _never(chosen, case, f"it calls a library, {chosen.spec.library}: there is no unit to write")
    if case.startswith(f"{chosen.key}[") and case.endswith("]"):
        case = case[len(chosen.key) + 1 : -1]
    folder = _free(folder)
    if case.startswith("compile "):
        return _write(folder, *_compiled(entry, chosen, case))
    executor = executor_for(device, Cache(), ahead=False)
    job = prepare(entry, chosen, _trial(entry, chosen, case, executor.target), executor, mutate)
    if isinstance(job, Evaluation):
        raise _never(chosen, case, job.reason)
    wanted = reference(entry, job.trial, job.arrays, catalog.ops)
    verdict = execute(job, executor, catalog.ops, stress=True, wanted=wanted)
    if verdict.status is Status.SKIPPED_UNSUPPORTED:
        raise _never(chosen, case, verdict.reason)
    facts = _facts(entry, chosen, job.source, verdict, "sim" if verdict.device == "sim" else "cuda") | _job_facts(job)
    facts["environment"] |= on_facts(executor)
    return _write(folder, facts, job.source, _files(job, wanted))


def replay(folder: Path, device: str = "", cache: Cache | None = None) -> Evaluation:
    """Executes the case in ``folder`` again, with ``kernel.cu`` as it is now, and judges it as conformance does.

    ``device``: ``sim`` or ``cuda``; by default the one it was written on. :class:`ArgumentError` where the folder does
    not hold a case, or holds one for another GPU.
    """
    try:
        facts = json.loads((folder / "case.json").read_text("utf-8"))
        if facts["format"] != FORMAT:
            raise ArgumentError("cannot replay", str(folder), f"format {facts['format']}", f"format {FORMAT}")
        source = _source(facts, (folder / "kernel.cu").read_text("utf-8"))
        job, wanted = (_job(facts, source, folder), _wanted(facts, folder)) if "problem" in facts else (None, None)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ArgumentError("cannot replay", str(folder), f"{type(e).__name__}: {e}", "a folder of `repro`") from e
    cache = cache or Cache()
    if job is None:
        return _compile(facts["fusion"], facts["kernel"], facts["case"], source, cache)
    executor = executor_for(device or facts["device"], cache, ahead=False)
    if executor.device != "sim" and executor.target != source.target:
        raise ArgumentError(
            "cannot replay", str(folder), f"a unit for {source.target}", f"one for {executor.target}, as this GPU is",
            "Write the folder on this GPU, or replay it with --device sim",
        )  # fmt: skip
    refused = executor.refusal(job.kernel)
    if refused:
        raise ArgumentError("cannot replay", str(folder), refused, "a device that runs the kernel", "Try --device cuda")
    return execute(job, executor, default_vocabulary(), stress=True, wanted=wanted)


# --- writing -------------------------------------------------------------------------------------------------------


def _free(folder: Path) -> Path:
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        found = "it is a file" if not folder.is_dir() else "the folder is not empty"
        raise ArgumentError("cannot write", str(folder), found, "a new or empty folder", "Pass --out")
    return folder


def _never(kernel: KernelEntry, case: str, reason: str) -> ArgumentError:
    return ArgumentError("cannot reproduce", f"{kernel.key}[{case}]", reason, "a case that runs")


def _trial(entry: FusionEntry, kernel: KernelEntry, case: str, target: str) -> Trial:
    known = {t.name: t for extent in ("quick", "all") for t in derive(entry, kernel, target, extent)}
    if case not in known:
        raise UnknownNameError.among(
            f"case of {kernel.key}", case, known, "`fusionreg run --cases all --json` lists them"
        )
    return known[case]


def _compiled(
    entry: FusionEntry, kernel: KernelEntry, case: str
) -> tuple[dict[str, Any], KernelSource, dict[str, np.ndarray]]:
    units = {f"compile {u.dtypes} {arch}": u for arch in SHIPPED for u in first_units(entry, kernel, arch)}
    if case not in units:
        raise UnknownNameError.among(f"case of {kernel.key}", case, units)
    source = units[case].source
    verdict = _compile(entry.name, kernel.name, case, source, Cache())
    if verdict.status is Status.SKIPPED_UNSUPPORTED:
        raise _never(kernel, case, verdict.reason)
    return _facts(entry, kernel, source, verdict, "sim"), source, {}


def _compile(fusion: str, kernel: str, case: str, source: KernelSource, cache: Cache) -> Evaluation:
    status, reason = Status.PASSED, ""
    try:
        compile_source(source, cache)
    except MissingDependencyError as e:
        status, reason = Status.SKIPPED_UNSUPPORTED, str(e)
    except CompileError as e:
        status, reason = Status.COMPILE_ERROR, str(e)
    return Evaluation(
        fusion, kernel, case, case.split()[1], status, device="nvrtc", target=source.target, reason=reason,
        digest=source.digest,
    )  # fmt: skip


def _facts(
    entry: FusionEntry, kernel: KernelEntry, source: KernelSource, verdict: Evaluation, device: str
) -> dict[str, Any]:
    spec = entry.spec.model_copy(update={"kernels": (kernel.spec,)})
    return {
        "format": FORMAT,
        "fusion": entry.name,
        "kernel": kernel.name,
        "case": verdict.case,
        "device": device,
        "verdict": {"status": verdict.status, "reason": verdict.reason, "max_abs": verdict.max_abs,
                    "max_rel": verdict.max_rel, "device": verdict.device},
        "unit": {"entry": source.entry, "target": source.target, "options": source.options,
                 "params": dict(source.params), "headers": source.headers,
                 "arguments": TypeAdapter(tuple[Argument, ...]).dump_python(source.arguments)},
        "environment": environment(),
        "spec": json.loads(spec.model_dump_json()),
    }  # fmt: skip


def _job_facts(job: Job) -> dict[str, Any]:
    problem, trial = job.problem, job.trial
    return {
        "dtypes": dict(problem.dtypes),
        "axes": dict(trial.axes),
        "attributes": dict(problem.attributes),
        "inputs": {
            name: {"dtype": a.dtype.name, "layout": trial.layouts.get(name, "contiguous"), "shape": a.shape,
                   "strides": [s // a.itemsize for s in a.strides]}
            for name, a in job.arrays.items()
        },
        "outputs": {n: t.dtype for n in problem.output_names if (t := problem.tensors[n]) is not None},
        "launch": TypeAdapter(Launch).dump_python(job.candidate.launch),
        "tensor_maps": TypeAdapter(tuple[TensorMapLayout, ...]).dump_python(job.candidate.maps),
        "problem": TypeAdapter(Problem).dump_python(problem),
    }  # fmt: skip


def _files(job: Job, wanted: Reference) -> dict[str, np.ndarray]:
    found = {f"inputs/{name}": a for name, a in job.arrays.items()}
    for name in job.problem.output_names:
        found |= {f"expected/{name}.{kind}": getattr(wanted, kind)[name] for kind in REFERENCES}
    return found


def _write(folder: Path, facts: dict[str, Any], source: KernelSource, arrays: Mapping[str, np.ndarray]) -> Path:
    """All files in a folder beside ``folder``, which then takes its name."""
    script = RUN.format(key=source.kernel, case=facts["case"], device=facts["device"])
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        (beside / "kernel.cu").write_text(source.text, "utf-8")
        (beside / "case.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        (beside / "run.py").write_text(script, "utf-8")
        for name, array in arrays.items():
            path = beside / f"{name}.npy"
            path.parent.mkdir(exist_ok=True)
            np.save(path, _raw(np.ascontiguousarray(array).reshape(array.shape)), allow_pickle=False)
        os.replace(beside, folder)
    except OSError as e:
        raise ArgumentError("cannot write", str(folder), e.strerror or str(e), "a writable folder", "Pass --out") from e
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def _raw(array: np.ndarray) -> np.ndarray:
    """Dtypes that ``.npy`` does not know as their bits."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


# --- reading -------------------------------------------------------------------------------------------------------


def _load(folder: Path, *parts: str) -> np.ndarray:
    return np.load(folder.joinpath(*parts[:-1], f"{parts[-1]}.npy"), allow_pickle=False)


def _wanted(facts: Mapping[str, Any], folder: Path) -> Reference:
    exact, chain, allowed = (
        {name: _load(folder, "expected", f"{name}.{kind}") for name in facts["outputs"]} for kind in REFERENCES
    )
    chain = {name: chain[name].view(dtype(kind).numpy) for name, kind in facts["outputs"].items()}
    return Reference(exact, chain, allowed)


def _source(facts: Mapping[str, Any], text: str) -> KernelSource:
    unit, key = facts["unit"], f"{facts['fusion']}/{facts['kernel']}"
    options = tuple(unit["options"])
    return KernelSource(
        text, unit["entry"], facts["fusion"], key, unit["target"], options,
        TypeAdapter(tuple[Argument, ...]).validate_python(unit["arguments"]),
        FrozenDict(unit["params"]), tuple(unit["headers"]),
        hashlib.sha256("\0".join((text, *options, unit["target"])).encode()).hexdigest(),
    )  # fmt: skip


def _job(facts: Mapping[str, Any], source: KernelSource, folder: Path) -> Job:
    """The job as it was, but for what only matching and rendering read of the fusion."""
    spec = FusionSpec.model_validate_json(json.dumps(facts["spec"]))
    kernel = KernelEntry(spec.kernels[0], "", "", spec.version, folder, folder / "kernel.cu")
    entry = FusionEntry(spec, "", "", spec.version, (), EMPTY, EMPTY, kernels=(kernel,))
    launch: Launch = TypeAdapter(Launch).validate_python(facts["launch"])
    maps = TypeAdapter(tuple[TensorMapLayout, ...]).validate_python(facts.get("tensor_maps", ()))
    problem: Problem = TypeAdapter(Problem).validate_python(facts["problem"])
    layouts = {name: str(row["layout"]) for name, row in facts["inputs"].items()}
    trial = Trial(facts["case"], problem.dtypes, FrozenDict(facts["axes"]), layouts=FrozenDict(layouts))
    arrays = {
        name: arrange(_load(folder, "inputs", name).view(dtype(row["dtype"]).numpy), row["layout"])
        for name, row in facts["inputs"].items()
    }
    return Job(entry, kernel, trial, problem, Candidate(kernel, source.params, launch, maps), source, arrays)
