"""Configurations refuse what cannot work, in one sentence that says what to do."""

from dataclasses import FrozenInstanceError, replace

import pytest

from companion.model import MODELS
from companion.state import Execution, RunConfig


@pytest.mark.parametrize("name", MODELS)
def test_every_preset_stands(name):
    run = RunConfig.preset(name)
    assert run.sequence <= run.model.context
    assert run.model == MODELS[name]


def test_tiny_divides_by_1_2_3_4_ranks():
    assert all(RunConfig.preset("tiny").global_batch % world == 0 for world in (1, 2, 3, 4))


def test_preset_takes_changes_and_dropout():
    run = RunConfig.preset("tiny", total_steps=600, dropout=0.1)
    assert (run.total_steps, run.model.dropout) == (600, 0.1)
    assert run == RunConfig.preset("tiny", dropout=0.1, total_steps=600)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunConfig.preset("huge"), "no preset 'huge'; there are tiny"),
        (lambda: RunConfig(global_batch=0), "global_batch is 0: give a whole number"),
        (lambda: RunConfig(global_batch=-3), "global_batch is -3"),
        (lambda: RunConfig(total_steps=0), "total_steps is 0"),
        (lambda: RunConfig(total_steps=1.5), "total_steps is 1.5"),
        (lambda: RunConfig(sequence=257), "sequence is 257, the model's context is 256"),
        (lambda: RunConfig(optimizer="lion"), "choose adamw or sgd"),
        (lambda: RunConfig(learning_rate=float("nan")), "learning_rate is nan"),
        (lambda: RunConfig(clip=-1.0), "clip is -1.0"),
        (lambda: RunConfig(seed=-1), "seed is -1"),
        (lambda: RunConfig(dtype="float16"), "dtype is 'float16'"),
        (lambda: RunConfig(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: RunConfig(warmup_steps="3"), "warmup_steps is '3'"),
        (lambda: RunConfig(global_batch=True), "global_batch is True"),
        (lambda: RunConfig(seed=0.5), "seed is 0.5"),
        (lambda: Execution(micro_batch="4"), "micro_batch is '4'"),
        (lambda: Execution(micro_batch=2.5), "micro_batch is 2.5"),
        (lambda: RunConfig(betas=(0.9,)), "betas is (0.9,)"),
        (lambda: RunConfig(final_fraction=2.0), "final_fraction is 2.0"),
        (lambda: Execution(strategy="zero"), "strategy is 'zero'"),
        (lambda: Execution(precision="fp8"), "precision is 'fp8'"),
        (lambda: Execution(micro_batch=0), "micro_batch is 0"),
    ],
)
def test_bad_values_get_one_sentence(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_change_names_what_there_is():
    with pytest.raises(TypeError, match="RunConfig has no stpes; it has betas"):
        RunConfig.preset("tiny", stpes=3)


def test_configurations_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        RunConfig().seed = 3
    assert replace(RunConfig(), seed=3) != RunConfig()


def test_schedule():
    run = RunConfig(total_steps=110, warmup_steps=10, final_fraction=0.2)
    assert [run.learning_rate_factor(s) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert run.learning_rate_factor(60) == pytest.approx(0.6)
    assert run.learning_rate_factor(110) == run.learning_rate_factor(999) == pytest.approx(0.2)
    assert RunConfig(total_steps=1, warmup_steps=0).learning_rate_factor(0) == 1.0
