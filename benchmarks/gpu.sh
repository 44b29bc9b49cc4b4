#!/usr/bin/env bash
# Build, test, measure and sanitize on a machine with an NVIDIA GPU, which may have no network.
#
#   benchmarks/gpu.sh [build|test|bench|sanitize|all] [--slow] [-- ARGUMENTS FOR PYTEST]
#
# Uses the Python, the compiler and the packages that are there ($PYTHON, default python3). Wheels
# in .wheels/ (not committed) are installed first, as they are. Results go to $OUT (default ./out):
# pytest*.log, pytest*.xml, benchmarks.json, sanitize.log. Every stage is bounded in time
# (BUILD_S, TEST_S, BENCH_S for each script, SANITIZE_S). The exit code is that of the worst stage.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=$(realpath -m "${OUT:-out}")
mkdir -p "$out"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
# Kernels are loaded before anything persistent runs: the first launch of one that is not loaded
# would wait for it.
export CUDA_MODULE_LOADING=EAGER

stage=${1:-all}
[ $# -gt 0 ] && shift
marks='not slow'
while [ $# -gt 0 ]; do
  case $1 in
    --slow) marks='' ;;
    --) shift; break ;;
    *) echo "gpu.sh: unknown argument $1" >&2; exit 2 ;;
  esac
  shift
done
pytest_arguments=("$@")

header() { printf '\n== %s\n' "$*"; }

build() {
  header build
  local wheels=(.wheels/*.whl)
  if [ -e "${wheels[0]}" ]; then
    "$python" -m pip install -q --no-index --no-deps --force-reinstall "${wheels[@]}" || return 1
  fi
  CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) timeout "${BUILD_S:-400}" \
    "$python" -m pip install -q --no-build-isolation --no-deps --force-reinstall . || return 1
  "$python" - <<'PY'
import importlib.util, sys
needed = ["numpy", "pytest", "hypothesis", "typer", "rich"]
useful = ["pytest_timeout", "pytest_benchmark", "xdist", "ml_dtypes", "matplotlib", "numba",
          "numba_cuda", "cuda.core", "cuda.bindings", "torch", "cupy", "rmm"]
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print("not installed:", " ".join(n for n in useful if not there(n)) or "nothing")
missing = [n for n in needed if not there(n)]
sys.exit(f"the tests need {' '.join(missing)}: put wheels into .wheels/" if missing else 0)
PY
  [ $? = 0 ] || return 1
  "$python" -m ringmem info
}

# What looks at the whole device (free memory, drivers that refuse) or keeps a kernel running goes
# alone; the rest on several processes where pytest-xdist is there.
tests() {
  header "tests ${marks:+(-m '$marks')}"
  local alone=(tests/driver tests/residency tests/virtual/test_every_platform.py
    tests/ring/test_cuda_kernel.py tests/ring/test_by_force.py)
  local spread=() worst=0 one
  if [ ${#pytest_arguments[@]} -gt 0 ]; then
    run_pytest pytest "${pytest_arguments[@]}"
    return
  fi
  "$python" -c 'import xdist' 2>/dev/null && spread=(-n $(($(nproc) * 3 / 4)) --dist loadfile)
  run_pytest pytest "${spread[@]}" "${alone[@]/#/--ignore=}" || worst=1
  for one in "${alone[@]}"; do
    run_pytest "pytest-$(basename "$one" .py)" "$one" || worst=1
  done
  return $worst
}

# run_pytest NAME ARGUMENTS…: NAME.log and NAME.xml in $out; the summary is printed.
run_pytest() {
  local name=$1
  shift
  timeout -k 10 "${TEST_S:-520}" "$python" -m pytest -q -p no:cacheprovider \
    ${marks:+-m "$marks"} --junitxml="$out/$name.xml" "$@" >"$out/$name.log" 2>&1
  local status=$?
  grep -aE '^(FAILED|ERROR|E  )|passed|failed' "$out/$name.log" | tail -n 40
  return $status
}

bench() {
  header benchmarks
  local parts worst=0 script name
  parts=$(mktemp -d)
  for script in benchmarks/bench_*.py; do
    [ -e "$script" ] || continue
    name=$(basename "$script" .py)
    timeout -k 10 "${BENCH_S:-180}" "$python" "$script" --json "$parts/$name.json" \
      >"$parts/$name.log" 2>&1 || { worst=1; echo "$name failed"; tail -n 20 "$parts/$name.log"; }
  done
  "$python" benchmarks/table.py "$parts" "$out/benchmarks.json" || worst=1
  rm -rf "$parts"
  return $worst
}

# One process, one test after the other: they look at the device's free memory and keep kernels
# running, which share a GPU by turns. memcheck lets a launch, and a stream's destruction, wait for
# what runs, so two tests that ask for the opposite are left out; they are in `test`. The canary's
# operations are fewer. Each test's end is a line of the log.
sanitize() {
  header "compute-sanitizer memcheck"
  local tests=("${pytest_arguments[@]}") status
  [ ${#tests[@]} -gt 0 ] || tests=(--ignore tests/ring/test_by_force.py)
  RINGMEM_CANARY_OPERATIONS=300 timeout -k 10 "${SANITIZE_S:-540}" \
    compute-sanitizer --tool memcheck --error-exitcode 86 \
    --report-api-errors no --target-processes all \
    "$python" -m pytest -v -p no:cacheprovider -m 'cuda and not slow' --timeout=100 \
    -k 'not destroying_a_stream_returns_at_once and not second_kernel_starts_beside' \
    "${tests[@]}" >"$out/sanitize.log" 2>&1
  status=$?
  grep -aE '^(FAILED|ERROR)|(FAILED|ERROR) +(\[|tests)|passed|failed' "$out/sanitize.log" | tail -n 25
  grep -aE 'ERROR SUMMARY|Invalid|Leaked' "$out/sanitize.log" | sort | uniq -c | tail -n 10
  echo "$(grep -acE 'PASSED' "$out/sanitize.log") tests passed"
  return "$status"
}

status=0
run() { "$@" || { status=$?; echo "-- $1: exit $status"; }; }
case $stage in
  build) run build ;;
  test) run tests ;;
  bench) run bench ;;
  sanitize) run sanitize ;;
  all)
    build || { echo "-- build failed"; exit 1; }
    run tests
    run bench
    run sanitize
    ;;
  *) echo "gpu.sh: unknown stage $stage" >&2; exit 2 ;;
esac
exit "$status"
