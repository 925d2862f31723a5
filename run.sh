#!/usr/bin/env bash
# The copy-paste driver. On a fresh machine (Python 3.11 to 3.13, no GPU needed) each of these does everything, set-up included:
#
#     bash run.sh nano             # corpus, 4 runs, evals, verdict, beside the committed record; afresh into results/replica_nano
#     bash run.sh test             # every test
#
#     bash run.sh setup            # the virtual environment .venv alone
#     bash run.sh nano --record    # writes the record itself, results/nano and evals/nano
#
# All of it skips what is done and can be stopped (Ctrl-C) and started again at any point.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
USAGE="$(sed -n '2,10s/^# \{0,1\}//p' run.sh)"

export OMP_WAIT_POLICY=PASSIVE                      # beside a busy process the default spins, many times slower
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"      # two single-threaded runs side by side beat one on two threads
export HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
PY=.venv/bin/python

die() { echo "run.sh: $*" >&2; exit 1; }

setup() { # setup FILE: the environment of a requirements file, made once for each content of both files
  local stamp
  stamp=".venv/$1.$(cat requirements.txt "$1" | sha256sum | cut -c1-16)"
  [ -e "$stamp" ] && return
  local python="${PYTHON:-python3}"
  command -v "$python" >/dev/null || die "no $python here; install Python 3.11 to 3.13, or name one: PYTHON=/path/to/python bash run.sh ..."
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || die "$python is not Python 3.11 to 3.13; name one: PYTHON=python3.11 bash run.sh ..."
  echo "set-up: $1 into .venv, a minute or two"
  "$python" -m venv .venv || die "no virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
  "$PY" -m pip install --quiet --disable-pip-version-check -r "$1" || die "pip failed; see above, then run the same command again"
  touch "$stamp"
}

side_by_side() { # every argument a command; all at once; a signal to this script stops them all; fails if one does
  local pids=() rc=0 stopped="" command p
  trap 'stopped=1; kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM HUP
  for command in "$@"; do $command & pids+=($!); done
  for p in "${pids[@]}"; do
    wait "$p" || rc=$?
    while kill -0 "$p" 2>/dev/null; do wait "$p" || rc=$?; done # a signal ends wait, not the child
  done
  trap - INT TERM HUP
  [ -z "$stopped" ] || die "stopped; the same command goes on where this ended"
  [ "$rc" = 0 ] || die "failed, for the reason above; what is done is kept"
}

nano() {
  local folder=replica_nano seed arm
  case "${1:-}" in
    "") ;;
    --record) folder=nano ;;
    *) die "nano takes --record or nothing, not $1" ;;
  esac
  setup requirements.txt
  [ -e data/nano/manifest.json ] || "$PY" prepare.py stdlib --out=data/nano --tokens=32000 --val_tokens=150000 --seed=3 --suite
  for seed in 0 1; do
    side_by_side "$PY train.py config/V_nano.py --seed=$seed --folder=$folder --resume=auto" \
      "$PY train.py config/L_nano.py --seed=$seed --folder=$folder --resume=auto"
  done
  local evals=()
  for arm in V L; do evals+=("$PY eval.py out/$folder/${arm}_s0/best.pt out/$folder/${arm}_s0/final.pt out/$folder/${arm}_s1/best.pt out/$folder/${arm}_s1/final.pt"); done
  side_by_side "${evals[@]}"
  echo
  "$PY" verdict.py nano --folder="$folder"
}

run_tests() {
  setup requirements-dev.txt
  "$PY" -m ruff check .
  "$PY" -m ruff format --check .
  "$PY" -m pytest -q --durations=10 test_smoke.py tests
}

case "${1:-}" in
  nano) nano "${@:2}" ;;
  test) run_tests ;;
  setup) setup requirements.txt ;;
  *) echo "$USAGE"; exit 2 ;;
esac
