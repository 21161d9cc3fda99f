"""samo adds itself to transformers in either order of imports, and imports nothing for it."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import samo
from samo.integrations import import_hook

# A small package in the place of transformers: the real one takes seconds to import.
FILES = {
    "transformers/__init__.py": "",
    "transformers/modeling_utils.py": "class PreTrainedModel: pass\nSTATE = 'run'\n",
}
WATCH = (
    "import sys\n"
    "from samo.integrations import import_hook\n"
    "import_hook._register = lambda: print('registered', "
    "sys.modules['transformers.modeling_utils'].STATE)\n"
)


def python(code: str, tmp_path: Path) -> list[str]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = str(Path(samo.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return done.stdout.splitlines()


def test_samo_waits_for_transformers(tmp_path: Path) -> None:
    code = WATCH + (
        "print('transformers' in sys.modules)\n"
        "import transformers.modeling_utils as module\n"
        "import inspect\n"
        "print(inspect.getsource(module.PreTrainedModel).strip())\n"
        "print(any(type(f).__module__.startswith('samo') for f in sys.meta_path))\n"
    )
    said = python(code, tmp_path)
    assert said == ["False", "registered run", "class PreTrainedModel: pass", "False"]


def test_asking_where_transformers_is_does_not_end_the_wait(tmp_path: Path) -> None:
    code = WATCH + (
        "import importlib.util, threading\n"
        "name = 'transformers.modeling_utils'\n"
        "print(importlib.util.find_spec(name).name == name)\n"
        "load = lambda: __import__(name)\n"
        "threads = [threading.Thread(target=load) for _ in range(4)]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
    )
    assert python(code, tmp_path) == ["True", "registered run"]


def test_samo_registers_at_once_if_transformers_is_there(tmp_path: Path) -> None:
    code = (
        "import sys, transformers.modeling_utils\n"
        "sys.modules['samo.integrations.hf_quantizer'] = None\n"  # as in other transformers
        + WATCH
        + "import_hook.install()\n"
    )
    assert python(code, tmp_path) == ["registered run"]


@pytest.mark.slow
def test_the_quantizer_can_be_imported_before_transformers() -> None:
    code = (
        "import samo.integrations.hf_quantizer\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "print(AUTO_QUANTIZER_MAPPING['samo'].__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "SamoQuantizer\n"


def test_a_module_that_is_still_being_imported_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(import_hook, "_register", lambda: called.append(1))
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", ModuleType("half"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    import_hook.install()
    import_hook.install()
    finders = [finder for finder in sys.meta_path if isinstance(finder, import_hook._Finder)]
    assert (len(finders), called) == (1, [])
    assert finders[0].find_spec("json", None) is None
