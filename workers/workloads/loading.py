"""From a workload's name to an instance of it. Does not run it."""

from __future__ import annotations

import importlib

from workers.errors import IncompatibleError
from workers.workloads.base import Workload, WorkloadContext
from workers.workloads.matmul import Matmul


def load_workload(name: str, context: WorkloadContext) -> Workload:
    """Make the workload `matmul`, or the user's `package.module:Class`.

    Raises:
        IncompatibleError: The name cannot be imported, or names something that is no workload.
    """
    if name == "matmul":
        return Matmul(context)
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise IncompatibleError(
            f"workload {name!r} cannot be loaded on this machine: {type(error).__name__}: {error}; install it here, "
            f"or start from the folder that holds {module_name.split('.')[0]}.py"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Workload)):
        raise IncompatibleError(f"workload {name!r} is not a subclass of workers.workloads.base.Workload")
    return found(context)
