"""Let transformers read compressed folders as soon as both packages are imported, in any order.

`import samo` must cost nothing, and transformers takes seconds to import. So a finder waits on
`sys.meta_path` until somebody imports the module of transformers that loads models; right after
that module has run, samo adds itself to it. A process that never imports transformers pays for one
comparison of names per import.
"""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_WAITED_FOR: Final = "transformers.modeling_utils"


def install() -> None:
    """Register samo with transformers now, if that is imported, or when it will be."""
    found = sys.modules.get(_WAITED_FOR)
    if hasattr(found, "PreTrainedModel"):  # not one that is still being imported
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module as the finders after it would, and adds a step to its import."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != _WAITED_FOR:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                # Only now: whoever just asks where the module is must not end the wait.
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # Whoever imported the module itself first has it half imported here; it registers at its end.
    with contextlib.suppress(ImportError):  # a transformers that samo does not know must import
        importlib.import_module("samo.integrations.hf_quantizer")
