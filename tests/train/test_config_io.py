"""Settings in files: what is written comes back, and mistakes are named."""

import json
from pathlib import Path

import pytest

from samo.errors import ConfigError
from samo.train.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PruneConfig,
    RunConfig,
    TrainConfig,
)
from samo.train.config_io import from_dict, read_toml, to_dict
from samo.train.resolve import resolve


def toml(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_settings_survive_json() -> None:
    config = TrainConfig(
        data=DataConfig(train=(Path("a"), Path("b")), tokenizer=Path("gpt2"), vocab_size=9),
        model=ModelConfig(shape="mini", init=Path("c")),
        prune=PruneConfig(skip=("x.*",), rules={"y": 0.5}),
        optim=OptimConfig(lr=0.1, betas=(0.8, 0.9)),
        run=RunConfig(mode="samo", dtype="bfloat16"),
    )
    for one in (config, resolve(config)):
        content = json.loads(json.dumps(to_dict(one)))
        assert from_dict(type(one), content, source="a copy") == one


def test_a_file_holds_only_what_differs_and_its_paths_start_at_its_folder(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        data = { train = "notes.txt", valid = ["a.txt", "/b.txt"], tokenizer = "gpt2" }
        [prune]
        sparsity = 0.8
        rules = { "blocks.0.*" = 0.5 }
        [optim]
        lr = 1
        betas = [0.9, 0.99]
        [run]
        mode = "dense"
        """,
    )
    assert read_toml(path) == TrainConfig(
        data=DataConfig(
            train=(tmp_path / "notes.txt",),
            valid=(tmp_path / "a.txt", Path("/b.txt")),
            tokenizer=tmp_path / "gpt2",
        ),
        prune=PruneConfig(sparsity=0.8, rules={"blocks.0.*": 0.5}),
        optim=OptimConfig(lr=1.0, betas=(0.9, 0.99)),
        run=RunConfig(mode="dense"),
    )
    assert read_toml(toml(tmp_path, "[data]\ntokenizer = 'bytes'")).data.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstepz = 3", r"unknown key 'run.stepz' \(did you mean 'steps'\?\)"),
        ("[optim]\nlearning_rate = 3", r"key 'optim.learning_rate'; \[optim\] takes lr, schedule"),
        ("[rum]\nsteps = 3", r"unknown key 'rum' \(did you mean 'run'\?\)"),
        ("steps = 3", r"unknown key 'steps'; it belongs under \[run\]"),
        ("run = 3", r"'run' is a section, \[run\], and got 3"),
        ("[run]\nsteps = 3.5", "'run.steps' takes a whole number, got 3.5"),
        ("[run]\nsteps = true", "'run.steps' takes a whole number, got true"),
        ("[run]\nmode = 'x'", '\'run.mode\' takes "samo" or "dense", got "x"'),
        ("[optim]\nbetas = [0.9]", r"takes a list \(2 entries, each a number\), got \[0.9\]"),
        ("[optim]\nlr = 'fast'", '\'optim.lr\' takes a number or "auto", got "fast"'),
        ("[data]\ntrain = 3", r"'data.train' takes a list \(each a path\), got 3"),
        ("[prune]\nrules = 3", r"'prune.rules' takes a table \(each value a number\), got 3"),
        ("[prune]\npattern = 4", "'prune.pattern' takes text, got 4"),
        ("[model]\ntied = 1", "'model.tied' takes true or false, got 1"),
        ("[model]\ninit = 1", "'model.init' takes a path, got 1"),
        ("[training]\nlr = 1", r"unknown key 'training'; the sections are \[data\], \[model\]"),
        (f"[optim]\nclip = {'9' * 400}", r"'optim.clip' takes a number, got 99\d*\.\.\.\d*99$"),
        (f"[optim]\nclip = {'9' * 5000}", "is not valid TOML"),
        ("a b", "is not valid TOML"),
        (b"\xff\xfe\x00", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
        ('[data]\ntrain = ["~no-such-user/x"]', "'data.train' takes a list"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_value(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_toml(toml(tmp_path, text))
    assert str(tmp_path / "run.toml") in str(caught.value)


def test_what_is_not_a_file_of_sections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config '.*none.toml': No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="a list holds list, not sections of settings"):
        from_dict(TrainConfig, [], source="a list")
