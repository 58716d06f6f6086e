"""What is said about command lines that do not compose; the errors are Hydra's own."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from leyden.advice import explain_composition_error
from leyden.config import conf_dir


def explain(*overrides: str) -> str:
    """The message for `python train.py OVERRIDES`."""
    arguments = ["name=test", *overrides]
    with (
        pytest.raises((HydraException, OmegaConfBaseException)) as caught,
        initialize_config_dir(str(conf_dir()), version_base="1.3"),
    ):
        compose("train", arguments)
    return explain_composition_error(caught.value, arguments)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.rl=0.1", "there is no key `optim.rl`. Did you mean `optim.lr`? Keys of optim: fused, lr, weight_decay"),
        ("model.net.hiden_dim=3", "Did you mean `model.net.hidden_dim`?"),
        ("lr=0.1", "there is no key `lr`."),
        ("sed=1", "there is no key `sed`. Did you mean `seed`?"),
        ("model.nett.hidden_dim=1", "Did you mean `model.net`?"),
        (
            "optim.amsgrad=true",
            "`optim.amsgrad` is not in the config, but torch.optim.AdamW takes it. Add it: +optim.amsgrad=VALUE.",
        ),
        ("trainer.profiler=simple", "`trainer.profiler` is not in the config, but lightning.pytorch.Trainer takes it."),
        ("+trainer.max_steps=3", "`trainer.max_steps` is in the config already. Set it without the plus: trainer.max"),
    ],
)
def test_unknown_keys(override: str, words: str) -> None:
    message = explain(override)
    assert message.startswith("ConfigError: ")
    assert words in message


def test_keys_are_those_of_the_chosen_groups() -> None:
    message = explain("optim=sgd", "optim.momentun=0.5", "data.batch_size=3")
    assert "there is no key `optim.momentun`. Did you mean `optim.momentum`?" in message
    assert "Keys of optim: fused, lr, weight_decay, momentum, nesterov." in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim=adamm", "there is no optim 'adamm'. Did you mean `adam`? Available: adam, adamw, muon, sgd."),
        ("experiment=visoin", "there is no experiment 'visoin'. Did you mean `vision`? Available: "),
        ("data=zzz", "there is no data 'zzz'. Available: auto_mpg, "),
        ("schedule=None", "there is no option 'schedule/None'. Write schedule=null for none."),
    ],
)
def test_unknown_options(override: str, words: str) -> None:
    assert words in explain(override)


def test_values_that_need_quotes() -> None:
    message = explain("data.path=a b=c")
    assert "needs quotes inside quotes: 'key=\"a=b c\"'" in message


def test_anything_else_is_hydras_own_message() -> None:
    message = explain("+seed=1")
    assert message.startswith("ConfigError: ")
    assert "seed" in message
    assert "already" in message


def test_where_the_rest_does_not_compose_either() -> None:
    assert explain_composition_error(
        HydraException("Could not override 'optim.rl'.\nKey 'rl' is not in struct"), ["optim=zzz", "optim.rl=1"]
    ) == ("ConfigError: there is no key `optim.rl`. `python train.py --cfg job` prints all keys.")
