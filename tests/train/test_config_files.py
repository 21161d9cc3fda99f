"""Settings in files: what is written comes back, and what is wrong is named."""

import json
from dataclasses import replace
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
from samo.train.config_files import changes, from_dict, read_toml, to_dict


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_settings_survive_json() -> None:
    config = TrainConfig(
        data=DataConfig(train=(Path("a"), Path("b")), tokenizer=Path("gpt2"), vocab_size=9),
        model=ModelConfig(shape="mini", init=Path("c")),
        prune=PruneConfig(skip=("x.*",), rules={"y": 0.5}),
        optim=OptimConfig(lr=0.1, betas=(0.8, 0.9)),
        run=RunConfig(mode="samo", dtype="bfloat16"),
    )
    assert from_dict(json.loads(json.dumps(to_dict(config))), source="a copy") == config


def test_a_file_says_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        version = 1
        [data]
        train = "notes.txt"
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
    config = read_toml(path)
    expected = TrainConfig(
        data=DataConfig(train=(tmp_path / "notes.txt",)),
        prune=PruneConfig(sparsity=0.8, rules={"blocks.0.*": 0.5}),
        optim=OptimConfig(lr=1.0, betas=(0.9, 0.99)),
        run=RunConfig(mode="dense"),
    )
    assert config == expected


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path) -> None:
    path = toml(tmp_path, "[data]\ntrain = ['a.txt', '/b.txt']\ntokenizer = 'gpt2'")
    config = read_toml(path)
    assert config.data.train == (tmp_path / "a.txt", Path("/b.txt"))
    assert config.data.tokenizer == tmp_path / "gpt2"


def test_the_word_bytes_is_no_path(tmp_path: Path) -> None:
    assert read_toml(toml(tmp_path, "[data]\ntokenizer = 'bytes'")).data.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstepz = 3", r"unknown key 'run.stepz' \(did you mean 'steps'\?\)"),
        ("[rum]\nsteps = 3", r"unknown key 'rum' \(did you mean 'run'\?\)"),
        ("steps = 3", r"unknown key 'steps'; it belongs under \[run\]"),
        ("run = 3", r"'run' is a section, \[run\], and got the value 3"),
        ("[run]\nsteps = '3'", "'run.steps' takes a whole number, got '3'"),
        ("[run]\nsteps = 3.5", "'run.steps' takes a whole number, got 3.5"),
        ("[run]\nsteps = true", "'run.steps' takes a whole number, got True"),
        ("[run]\nmode = 'sparse'", "'run.mode' takes one of 'samo', 'dense', got 'sparse'"),
        ("[optim]\nbetas = [0.9]", r"'optim.betas' takes a list of numbers, got \[0.9\]"),
        ("[optim]\nlr = 'fast'", "'optim.lr' takes a number or 'auto', got 'fast'"),
        ("[data]\ntrain = 3", "'data.train' takes a list of paths, got 3"),
        ("[prune]\nrules = 3", "'prune.rules' takes a table of patterns and numbers, got 3"),
        ("[model]\ntied = 1", "'model.tied' takes true or false, got 1"),
        ("[model]\ninit = 1", "'model.init' takes a path, got 1"),
        ("version = 2", "is of version 2, and this samo reads version 1; use the samo it was written for"),
        ("a b", "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_key_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_toml(toml(tmp_path, text))
    assert str(tmp_path / "run.toml") in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config '.*none.toml': No such file"):
        read_toml(tmp_path / "none.toml")


def test_a_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_toml(path)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list holds list, not sections of settings"):
        from_dict([], source="a list")


def test_changes_are_named_by_section_and_key() -> None:
    old = TrainConfig()
    new = replace(old, optim=OptimConfig(lr=0.5), run=RunConfig(seed=3))
    assert changes(old, new) == {"optim.lr": ("auto", 0.5), "run.seed": (0, 3)}
