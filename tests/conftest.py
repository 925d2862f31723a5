"""Fixtures: tiny data made by the real prepare.py, and a project that holds them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT, Project


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    command = [sys.executable, "prepare.py", "stdlib", f"--out={folder}", "--tokens=8000", "--val_tokens=6000", "--seed=5", "--suite", "--window=32"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture
def project(tmp_path, tiny_data) -> Project:
    p = Project(tmp_path)
    shutil.copytree(tiny_data, p.path / "data" / "tiny")
    yield p
    for process in p.started:
        process.kill()
        process.wait()
