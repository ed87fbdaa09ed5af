"""What a plugin author's tests import, and the pytest plugin ``pytest --fusionreg``.

``assert_conforms("acme.bias_relu2")`` in a test runs every kernel of a fusion on its derived cases. ``pytest
--fusionreg`` collects one test per (fusion, kernel, case) of the plugins whose packages lie in the current repository;
``--fusionreg=NAME`` takes a fusion, a plugin, or ``all``. Without the option nothing of fusionreg's core is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from fusionreg.core.conformance import Trial
    from fusionreg.core.proof.report import Evaluation, Report
    from fusionreg.core.registry.catalog import Catalog

__all__ = ["assert_conforms", "assert_mutants_die"]


def assert_conforms(
    fusion: str,
    *,
    device: str = "auto",
    cases: Literal["quick", "all"] = "quick",
    kernels: Sequence[str] | None = None,
    catalog: Catalog | None = None,
) -> Report:
    """Runs conformance of one fusion and returns its report.

    Args:
        fusion: its name.
        device: ``sim``, ``cuda``, or ``auto``: a GPU where there is one.
        cases: ``quick`` or ``all``.
        kernels: kernels to keep; None for all.
        catalog: the registry; by default every installed plugin.

    Raises: :class:`AssertionError` that lists every failed case, or says that no case ran.
    """
    from fusionreg.core.cache import Cache
    from fusionreg.core.conformance import run

    report = run(catalog or _catalog(), [fusion], device=device, cases=cases, kernels=kernels, cache=Cache())
    if report.failures:
        shown = "\n".join(f"  {e}" for e in report.failures[:20])
        more = f"\n  … and {len(report.failures) - 20} more" if len(report.failures) > 20 else ""
        raise AssertionError(
            f"{fusion}: {len(report.failures)} of {len(report.evaluations)} cases fail:\n{shown}{more}"
        )
    if not report.ok:
        reasons = sorted({e.reason for e in report.evaluations})
        raise AssertionError(f"{fusion}: no case ran: {'; '.join(reasons) or 'it has no kernel'}")
    return report


def assert_mutants_die(
    fusion: str, *, device: str = "sim", kernels: Sequence[str] | None = None, **options: Any
) -> None:
    """Plants faults in the fusion's kernels; :class:`AssertionError` naming those that conformance does not notice.

    ``options``: further arguments of ``conformance.run_mutants``: ``extra`` mutants, ``executor``.
    """
    from fusionreg.core.cache import Cache
    from fusionreg.core.conformance import run_mutants

    verdicts = run_mutants(_catalog(), [fusion], device=device, kernels=kernels, cache=Cache(), **options)
    alive = [str(v) for v in verdicts if v.survived]
    if alive or not any(v.applies for v in verdicts):
        raise AssertionError("\n".join(alive) or f"{fusion}: no mutant applies to any kernel")


def _catalog() -> Catalog:
    from fusionreg.core.registry import catalog as registry

    return registry.load()


# --- the pytest plugin ---------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusionreg", "conformance of fused CUDA kernels")
    group.addoption(
        "--fusionreg",
        nargs="?",
        const="",
        default=None,
        metavar="NAME",
        help="run conformance of the plugins in this repository, or of a fusion or plugin by name, or of all",
    )
    group.addoption("--fusionreg-device", default="auto", choices=("auto", "sim", "cuda"), help="where it runs")
    group.addoption("--fusionreg-cases", default="quick", choices=("quick", "all"), help="how many cases")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--fusionreg")
    if wanted is not None:
        items.extend(_items(session, wanted))


def _items(session: pytest.Session, wanted: str) -> Iterator[pytest.Item]:
    from fusionreg.core.cache import Cache
    from fusionreg.core.conformance import derive, executor_for

    catalog = _catalog()
    executor = executor_for(session.config.getoption("--fusionreg-device"), Cache())
    collector = _Kernels.from_parent(session, name="fusionreg", nodeid="fusionreg")
    for name in _chosen(catalog, wanted, session.config):
        entry = catalog[name]
        for kernel in entry.kernels:
            for trial in derive(entry, kernel, executor.target, session.config.getoption("--fusionreg-cases")):
                yield _Case.from_parent(
                    collector,
                    name=f"{name}/{kernel.name}[{trial.name}]",
                    run=(catalog, name, kernel.name, trial, executor),
                )


def _chosen(catalog: Catalog, wanted: str, config: pytest.Config) -> list[str]:
    """Fusion names; :class:`pytest.UsageError` where nothing has the name, or no plugin is in the repository."""
    if wanted == "all":
        return sorted(catalog.fusions)
    if wanted in catalog.fusions:
        return [wanted]
    rows = [p for p in catalog.plugins if p.name == wanted] if wanted else _here(catalog, config)
    failed = [str(f) for f in catalog.failures if not wanted or f.plugin == wanted]
    if not rows:
        known = ", ".join(sorted(p.name for p in catalog.plugins)) or "none"
        why = f"; {'; '.join(failed)}" if failed else ""
        what = f"no fusion or plugin {wanted!r}" if wanted else f"no plugin's package lies in {config.rootpath}"
        raise pytest.UsageError(f"--fusionreg: {what} — installed plugins: {known}{why}")
    return sorted(f for row in rows for f in row.fusions)


def _here(catalog: Catalog, config: pytest.Config) -> list[Any]:
    """Plugins whose package lies in the repository itself, not in an environment inside it."""
    found = []
    for row in catalog.plugins:
        root = row.root.resolve() if row.root else None
        if root and root.is_relative_to(config.rootpath.resolve()) and "site-packages" not in root.parts:
            found.append(row)
    return found


class ConformanceFailure(Exception):
    """A case that failed; the evaluation says how."""


class _Kernels(pytest.Collector):
    """Parent of the collected cases."""

    def collect(self) -> list[pytest.Item]:
        return []


class _Case(pytest.Item):
    """One kernel on one case."""

    def __init__(self, *, run: tuple[Catalog, str, str, Trial, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run = run

    def runtest(self) -> None:
        from fusionreg.core.conformance import run_one
        from fusionreg.core.proof.report import Status

        found: Evaluation = run_one(*self._run)
        self.user_properties += [("max_abs", found.max_abs), ("max_rel", found.max_rel), ("device", found.device)]
        if found.status is Status.SKIPPED_UNSUPPORTED:
            pytest.skip(found.reason)
        if found.status.failed:
            raise ConformanceFailure(str(found))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name
