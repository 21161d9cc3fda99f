"""Hugging Face Trainer, which is Accelerate's too, and peft, against masked dense training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import samo
from tests.core.twins import hugging_face, twins

STEPS = 20


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (64, 10), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(model: Any, folder: Path, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 3e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "seed": 3, "weight_decay": 0.0,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**(settings | changes))
    return transformers.Trainer(model=model, args=arguments, train_dataset=texts())


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate, about each other
def test_hugging_face_trainer_trains_as_masked_dense_and_resumes_exactly(tmp_path: Path) -> None:
    model = hugging_face("gpt2")
    model, dense = twins(model, samo.prune(model, 0.8))
    resumed = copy.deepcopy(model)
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    runs = [trainer_of(model, tmp_path, **saving), trainer_of(dense, tmp_path)]
    for run in runs:
        run.train()
    losses = [logged(run, "loss") for run in runs]
    norms = [logged(run, "grad_norm") for run in runs]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)  # the true norm
    assert max(norms[0]) > 0.5  # clipping was active
    assert losses[0][-1] < losses[0][0]
    again = trainer_of(resumed, tmp_path, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert logged(again, "loss") == losses[0]  # of the first half, as saved
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters()))


# Adapters


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)  # the same adapters for both
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


def train_adapters(model: Any) -> list[float]:
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    ids = torch.arange(24).view(2, 12)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("way", ["merged", "merged safely", "merged after decompress_"])
def test_adapters_train_and_merge_as_on_a_dense_base(way: str, weights: Any) -> None:
    masks = samo.prune(start := hugging_face("llama"), 0.8)
    base, dense = twins(start, masks, weights=weights)
    model, twin = with_adapters(base), with_adapters(dense)
    frozen = [param for param in base.parameters() if not param.requires_grad]
    before = [param.detach().clone() for param in frozen]
    assert train_adapters(model) == train_adapters(twin)
    assert all(torch.equal(*pair) for pair in zip(before, frozen))
    assert not [param for param in frozen if param.grad is not None]
    expected = twin.merge_and_unload(safe_merge=way == "merged safely")
    if way == "merged after decompress_":
        state = samo.decompress_(model).merge_and_unload().state_dict()
    else:
        with pytest.warns(UserWarning, match=r"as when adapters are merged, call samo.decompress_"):
            state = samo.dense_state_dict(model.merge_and_unload(safe_merge=way == "merged safely"))
        masks.apply_(expected)  # the mask stays
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


def test_saved_adapters_load_onto_a_compressed_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, _ = twins(start := hugging_face("llama"), samo.prune(start, 0.8))
    model = with_adapters(copy.deepcopy(base))
    train_adapters(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
