"""bench.py: each mode as a real process, in miniature; what it records, and that losses fall. No time decides a test."""

import math

import pytest
from project import Project

from guard import read_json

CPU = {"CUDA_VISIBLE_DEVICES": ""}  # what a CPU is asked is the same everywhere


@pytest.fixture(scope="module")
def p(tmp_path_factory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize("ranks", [0, 2])
def test_node(p, ranks):
    out = p.ok("bench.py", "node", ranks=ranks, env=CPU)
    r, world = read_json(p.path / "results/bench/node.json"), ranks or 1
    rows = {row["what"]: row for row in r["figures"]}
    assert list(rows) == [f"matmul, rank {i}" for i in range(world)] + ["all-reduce bus", "disk, out/"]
    assert all(row["value"] > 0 for what, row in rows.items() if what != "all-reduce bus" or ranks)
    assert all(row["expected"] is None and not row["slow"] for row in rows.values()), "nothing is claimed of a CPU"
    assert r["world_size"] == len(r["devices"]) == world and r["versions"]["torch"]
    assert (r["rung"], r["update"]["micro_batch"], len(r["update"]["losses"])) == ("nano", 16 // world, 2)
    assert abs(r["update"]["losses"][0] - math.log(257)) < 0.5 and "expected about" in out
    assert not list((p.path / "out").iterdir()), "the disk check leaves nothing"


def test_node_under_fsdp_accumulated(p):
    (p.path / "config/F.py").write_text('base = "L_nano.py"\nparallel = "fsdp"\nmicro_batch = 4\n')
    p.ok("bench.py", "node", "--config=config/F.py", ranks=2, env=CPU)
    update = read_json(p.path / "results/bench/node.json")["update"]
    assert (update["micro_batch"], update["accum"]) == (4, 2)


def test_gpucheck(p):
    p.ok("bench.py", "gpucheck", "--tiny", timeout=900, env=CPU)
    r = read_json(p.path / "results/gpucheck_tiny.json")
    assert [(c["arm"], c["ckpt"]) for c in r["cases"]] == [("V", "all"), ("L", "all"), ("V", "none"), ("L", "none")]
    for c in r["cases"]:
        assert c["status"] == "ok" and c["tokens_per_sec"] > 0 and c["mfu"] is None and c["peak_gib"] is None
        assert c["compile"] == (c["ckpt"] == "all") == (c["compile_sec"] is not None)
        assert len(c["losses"]) == len(c["sec"]) >= 4 and c["losses"][-1] < c["losses"][0] - 0.1
    by = {(c["arm"], c["ckpt"]): c["losses"] for c in r["cases"]}
    for arm in ("V", "L"):
        n = min(len(by[arm, "all"]), len(by[arm, "none"]))
        assert by[arm, "all"][:n] == pytest.approx(by[arm, "none"][:n], rel=1e-3), "neither checkpointing nor compiling changes the numbers"


def test_train(p):
    out = p.ok("bench.py", "train", "--d=32", "--n_layer=2", "--window=32", "--batch=2", "--vocab=257", "--repeats=3", "--no_compile", timeout=900, env=CPU)
    r = read_json(p.path / "results/bench/train.json")
    assert list(r["tokens_per_sec"]) == ["V eager", "L eager", "HF eager"]
    assert all(len(v["all"]) == 3 and 0 < v["min"] <= v["median"] <= v["max"] for v in r["tokens_per_sec"].values())
    v = {k: x["median"] for k, x in r["tokens_per_sec"].items()}
    assert r["ours_over_hf"]["ratio"] == v["V eager"] / v["HF eager"] and r["l_over_v"]["ratio"] == v["L eager"] / v["V eager"]
    assert 0 < r["loader_share"] < 1 and r["shape"]["vocab_size"] == 257 and r["threads"] >= 1 and "V eager / HF eager" in out


def test_refusals(p):
    assert "must be even" in p.refused("bench.py", "train", "--n_layer=3")
    assert "no CUDA GPU" in p.refused("bench.py", "gpucheck")
    (p.path / "transformers.py").write_text("raise ImportError\n")
    assert "requirements-dev.txt" in p.refused("bench.py", "train", "--d=32", "--n_layer=2", "--no_compile")
    (p.path / "transformers.py").unlink()
