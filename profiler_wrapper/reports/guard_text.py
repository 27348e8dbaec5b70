"""What a guard says, as text."""

from __future__ import annotations

import textwrap

from profiler_wrapper.analysis.guard import GuardCheck, GuardReport
from profiler_wrapper.reports.text import clean

_MOST = 8  # findings of one check
_WORDS = {"ok": "ok", "regression": "REGRESSION", "improved": "improved", "not judged": "not judged"}


def guard_text(report: GuardReport, *, width: int = 100, unicode: bool = False) -> str:
    """The verdict, then each check with what it found."""
    lines = textwrap.wrap(clean(report.verdict, unicode=unicode), width)
    runs = f"{report.baseline_runs} run{'s' if report.baseline_runs > 1 else ''}"
    lines.append(clean(f"baseline {report.baseline} ({runs}), run {report.run}", unicode=unicode))
    lines += [
        line
        for what, before, after in report.differences
        for line in _wrapped(f"differs: {what}: {before} -> {after}", width, unicode)
    ]
    for check in report.checks:
        lines += _check(check, width, unicode)
    return "\n".join(lines)


def _check(check: GuardCheck, width: int, unicode: bool) -> list[str]:
    reason = f" ({check.reason})" if check.reason else ""
    lines = _wrapped(f"{_WORDS[check.status]:10s}  {check.name}{reason}", width, unicode)
    said = ((check.regressions, "worse"), (check.improvements, "better"), (check.consequences, "follows"))
    for findings, word in said:
        for finding in findings[:_MOST]:
            lines += _wrapped(f"    {word}: {finding.text}", width, unicode)
        if len(findings) > _MOST:
            lines.append(f"    {word}: {len(findings) - _MOST} more")
    return lines


def _wrapped(text: str, width: int, unicode: bool) -> list[str]:
    return textwrap.wrap(clean(text, unicode=unicode), width, subsequent_indent="      ") or [""]
