"""Balanced, seeded start groups under the Trainer, and the losses of every start."""

from collections import Counter

import pytest
import torch
from families import build, random_tokens
from transformers import Trainer, TrainingArguments

from hf_hybrid.training.start_groups import (
    StartGroupCollator,
    balanced_start_groups,
    evaluate_starts,
    start_losses,
)


@pytest.mark.parametrize(("batch", "groups"), [(12, 4), (7, 3), (2, 5), (1, 2), (3, 1)])
def test_groups_are_balanced_within_a_batch_and_over_batches(batch, groups):
    total = Counter()
    for seed in range(400):
        counts = Counter(balanced_start_groups(batch, groups, seed).tolist())
        assert set(counts) <= set(range(groups))
        assert max(counts.values()) - min(counts.get(group, 0) for group in range(groups)) <= 1
        total += counts
    expected = 400 * batch / groups
    assert all(abs(total[group] - expected) < 5 * expected**0.5 for group in range(groups))


def rows(count=9, length=8):
    return [{"input_ids": row, "labels": row} for row in random_tokens(count, length)]


def test_groups_follow_from_seed_and_tokens():
    data = rows()
    collate = StartGroupCollator(3, seed=4)
    first = collate(data)["start_groups"]
    assert torch.equal(first, StartGroupCollator(3, seed=4)(data)["start_groups"])
    assert Counter(first.tolist()) == {0: 3, 1: 3, 2: 3}
    others = [StartGroupCollator(3, seed=seed)(data)["start_groups"] for seed in range(5, 10)]
    assert any(not torch.equal(first, other) for other in others)
    assert any(not torch.equal(first, collate(rows(9, length))["start_groups"]) for length in (5, 6, 7))
    with pytest.raises(ValueError, match="num_groups is 0"):
        StartGroupCollator(0)


def trainer_of(model, folder, **options):
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=6,
        per_device_eval_batch_size=4,
        **options,
    )
    return Trainer(model, arguments, train_dataset=rows(12), eval_dataset=rows(5), data_collator=StartGroupCollator(3))


def test_the_trainer_evaluates_every_start(tmp_path):
    model = build(("mobius", "headwise"))
    trainer = trainer_of(model, tmp_path)
    metrics = evaluate_starts(trainer)
    windows = torch.stack([row["input_ids"] for row in rows(5)])
    # A batch's loss is its mean over rows, and the Trainer weighs batches by their rows.
    expected = start_losses(model, windows)
    assert len(set(expected)) == 3
    for start, loss in enumerate(expected):
        assert metrics[f"eval_start_{start}_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["eval_loss"] == pytest.approx(sum(expected) / 3, rel=1e-4)
    assert trainer.state.log_history[-1]["eval_loss"] == metrics["eval_loss"]


def test_training_reaches_every_start(tmp_path):
    """Trained from all starts, all starts learn; trained from one, the others do not."""
    drops = []
    for everywhere in (True, False):
        model = build(("mobius", "headwise"))
        before = torch.tensor(start_losses(model, torch.stack([row["input_ids"] for row in rows(12)])))
        trainer = trainer_of(model, tmp_path, max_steps=30, learning_rate=5e-3, lr_scheduler_type="constant")
        if not everywhere:
            trainer.data_collator = lambda batch: {
                **StartGroupCollator(3)(batch),
                "start_groups": torch.zeros(len(batch), dtype=torch.long),
            }
        trainer.train()
        after = torch.tensor(start_losses(model.eval(), torch.stack([row["input_ids"] for row in rows(12)])))
        drops.append((after / before).tolist())
    assert all(drop < 0.6 for drop in drops[0])
    assert drops[1][0] < 0.6 < min(drops[1][1:])


def test_a_fixed_order_has_one_loss():
    model = build(("mobius", "looped"))
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens, labels=tokens).loss.item()
    assert start_losses(model, tokens) == [pytest.approx(expected, rel=1e-5)]
