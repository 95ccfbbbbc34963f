"""Report of the installation and of what a call uses."""

from __future__ import annotations

import sys

import numpy as np

from fastattn._engine import settings
from fastattn._engine.settings import Report
from fastattn._version import __version__


def show_config() -> Report:
    """Report the installation and the settings of calls.

    Returns
    -------
    Report
        A dict that prints as a table: ``version``, ``backend`` ("compiled" or "numpy"), ``why_numpy`` (None
        if compiled), ``isa`` in use (None on NumPy), ``isa_refused`` (why the system does not allow a better
        one, or None), ``isa_left_out`` (a better one for this CPU that was not compiled, or None),
        ``isas_available`` on this CPU, ``isas_compiled``, ``num_threads``, ``num_threads_from`` (the variable
        or limit that sets it), ``threading`` ("openmp"; "team", fastattn's pool; "borrowed", torch's pool
        while `fastattn.torch` is imported; None on NumPy), ``threading_available`` in this build,
        ``level2_cache`` (bytes per core, or None if unknown), ``compiler``, and the versions of NumPy and
        Python.
    """
    return Report(
        version=__version__,
        backend=settings.current.backend,
        why_numpy=settings.why_numpy(),
        isa=settings.core.get_isa() if settings.current.backend == "compiled" else None,
        isa_refused=settings.core.isa_refused if settings.core else None,
        isa_left_out=settings.core.isa_left_out() if settings.core else None,
        isas_available=settings.available_isas(),
        isas_compiled=settings.core.COMPILED_ISAS if settings.core else (),
        num_threads=settings.get_num_threads(),
        num_threads_from=settings.current.threads_from,
        threading=settings.core.whose_threads() if settings.current.backend == "compiled" else None,
        threading_available=settings.available_threadings(),
        level2_cache=settings.core.LEVEL2_CACHE or None if settings.core else None,
        compiler=settings.core.COMPILER if settings.core else None,
        numpy=np.__version__,
        python=sys.version.split()[0],
    )
