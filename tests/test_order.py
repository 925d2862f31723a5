"""The order of data, the schedule and the config: pure functions, no processes."""

import hashlib
import math

import numpy as np
import pytest

import train
from guard import Refusal
from train import Config, batch_windows, epoch_order, load_config, lr_at, total_steps


@pytest.mark.parametrize("n, batch", [(249, 16), (64, 16), (7, 16), (1, 8)])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_window_once_an_epoch(n, batch, world):
    """Three epochs, read as the ranks read them: each rank's slice of each global batch."""
    seen = []
    for step in range(math.ceil(3 * n / batch)):
        ids, share = batch_windows(1, step, batch, n), batch // world
        ranks = [ids[r * share : (r + 1) * share] for r in range(world)]
        seen += np.concatenate(ranks).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert n < 64 or seen[:n] != seen[n : 2 * n]


def test_seeds_and_epochs_differ_and_the_stream_is_frozen():
    assert not np.array_equal(epoch_order(0, 0, 249), epoch_order(1, 0, 249))
    assert not np.array_equal(epoch_order(0, 1, 249), epoch_order(1, 0, 249))
    assert hashlib.sha256(epoch_order(0, 0, 249).astype("<i8").tobytes()).hexdigest() == "1a1861e8b03e09222401a5da85cb4089dede209f192c88ae59730697b6191b35"


def test_1b_steps():
    cfg = Config(unique_tokens=3_000_000_000, window=4096, batch=512, epochs=5.0)
    n = train.n_windows(cfg.unique_tokens, cfg.window)
    assert n == 732_421
    assert total_steps(cfg) == 7153
    assert 7153 * 512 - 5 * n == 231


def test_schedule():
    cfg = Config(unique_tokens=32_000, window=128, batch=16, epochs=20.0, warmup=30, lr=1e-3)
    end = total_steps(cfg)
    rates = [lr_at(cfg, s) for s in range(end + 50)]
    assert rates[0] == pytest.approx(1e-3 / 30)
    assert rates[29] == rates[30] == pytest.approx(1e-3)
    assert all(np.diff(rates[30:end]) < 0)
    assert rates[end - 1] == pytest.approx(1e-4)
    assert set(rates[end:]) == {rates[end - 1]}
    assert lr_at(cfg, 30 + (end - 31) // 2) == pytest.approx(5.5e-4, rel=0.02)


def test_config_reads_base_and_overrides():
    v, cfg = load_config(["config/V_nano.py"]), load_config(["config/L_nano.py", "--seed=3", "--tag=x", "--compile", "--n_layer=4", "--epochs=2"])
    assert (v.n_layer, v.n_loop, v.eps, v.name) == (6, 1, 1.0, "V_s0")
    assert (cfg.n_layer, cfg.n_loop, cfg.window, cfg.epochs, cfg.compile, cfg.name) == (4, 2, v.window, 2.0, True, "L_s3_x")
    assert cfg.eps == pytest.approx(1 / (2 * math.sqrt(4)))


@pytest.mark.parametrize(
    "args, words",
    [
        (["config/V_nano.py", "--n_leyer=3"], ["n_leyer", '"n_layer"']),
        (["config/V_nano.py", "--n_layer=three"], ["n_layer", "int"]),
        (["config/V_nano.py", "--n_layer=2.5"], ["n_layer", "int"]),
        (["config/V_nano.py", "--lr=nan"], ["lr", "float"]),
        (["config/V_nano.py", "--compile=yes"], ["compile", "True or False"]),
        (["config/V_nano.py", "--n_layer"], ["n_layer"]),
        (["config/V_nano.py", "n_layer=3"], ["--key=value"]),
        (["config/V_nano.py", "--n_layer", "3"], ["n_layer"]),
        (["config/V_nano.py", "--n_layer=3"], ["--tag"]),
        (["config/V_nano.py", "--max_steps=3"], ["--tag"]),
        (["config/V_nano.py", "--n_head=5", "--tag=x"], ["n_head", "64"]),
        (["config/V_nano.py", "--tag=a/b"], ["tag"]),
        (["config/V_nano.py", "--batch=0", "--tag=x"], ["batch"]),
        (["config/V_nano.py", "--max_steps=-1", "--tag=x"], ["max_steps"]),
        (["config/V_nano.py", "--seed=-1"], ["seed"]),
        (["config/V_nano.py", "--seed=5000000000"], ["seed"]),
        (["config/V_nano.py", "--beta1=2", "--tag=x"], ["beta1"]),
        (["config/V_nano.py", "--folder=.."], ["folder"]),
        (["config/V_nano.py", "--resume=yes"], ["resume", "never, auto"]),
        (["config/V_1000b.py"], ["V_1000b", "V_nano.py"]),
    ],
)
def test_config_refusals(args, words):
    with pytest.raises(Refusal) as e:
        load_config(args)
    assert "\n" not in str(e.value)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_config_file_refusals(tmp_path):
    for text, word in [
        ("n_leyer = 3", "n_layer"),
        ("n_layer = '3x'", "int"),
        ("n_layer = (", "SyntaxError"),
        ("base = 'none.py'", "none.py"),
        ("base = 3", "base = 3"),
    ]:
        path = tmp_path / "c.py"
        path.write_text(text)
        with pytest.raises(Refusal, match=word):
            load_config([str(path)])


def test_an_edited_config_cannot_pose_as_registered():
    """The bars file registers each arm: an untagged run of anything else is refused, whatever file it came from."""
    cfg = load_config(["config/L_nano.py"])
    train.check_registered(cfg)
    for key, value in {"eps": 0.5, "warmup": 31, "n_embd": 128, "arm": "X"}.items():
        edited = load_config(["config/L_nano.py"])
        setattr(edited, key, value)
        with pytest.raises(Refusal, match="--tag"):
            train.check_registered(edited)
        edited.tag = "x"
        train.check_registered(edited)
    cfg.lr = 1e-3  # the probe's
    train.check_registered(cfg)


def test_split_batch():
    cfg = Config(batch=24, micro_batch=16)
    assert train.split_batch(cfg) == (12, 2)
