#!/usr/bin/env bash
# Runs `verify gate` for ci/action.yml, or anywhere else. Everything comes from the environment and
# is only ever an argument: nothing that it holds is run, split or expanded.
#
#   GATE_CONFIG   the file of the gate (ci/gate.toml)
#   GATE_SINCE    a revision; empty: changed sources are not asked for
#   GATE_REPORT   the folder of the report (verify-report)
#   GATE_PYTHON   an interpreter; empty: `verify` on PATH if nothing is installed, else python3
#   GATE_INSTALL  what pip installs, one requirement a line; none: nothing; empty: the checkout of
#                 this script on a GitHub runner, nothing anywhere else
#
# Ends with the exit code of the gate: 0 verified, 1 mismatch, 2 usage or file, 3 unverified.
set -Eeuo pipefail
trap 'exit 2' ERR # whatever fails here is no verdict

readonly LIMIT=200000 # bytes of a step summary
config=${GATE_CONFIG:-ci/gate.toml}
report=${GATE_REPORT:-verify-report}
install=${GATE_INSTALL:-}
if [[ -z $install && ${GITHUB_ACTIONS:-} != true ]]; then
  install=none # a runner is thrown away; somebody's interpreter is not
fi
here=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

refuse() {
  printf 'action.sh: %s\n' "$1" >&2
  conclude 2
}

# Outputs, summary and exit code; the one way out.
conclude() {
  local code=$1 verdict=ERROR
  case $code in
    0) verdict=VERIFIED ;;
    1) verdict=MISMATCH ;;
    3) verdict=UNVERIFIED ;;
  esac
  if [[ -n ${GITHUB_OUTPUT:-} ]]; then
    printf 'verdict=%s\n' "$verdict" >>"$GITHUB_OUTPUT"
    printf 'exit-code=%s\n' "$code" >>"$GITHUB_OUTPUT"
    if [[ -n $folder ]]; then
      printf 'report=%s\n' "$folder" >>"$GITHUB_OUTPUT"
    fi
  fi
  if [[ -n ${GITHUB_STEP_SUMMARY:-} ]]; then
    summarize "$verdict" "$code" >>"$GITHUB_STEP_SUMMARY"
  fi
  exit "$code"
}

summarize() {
  local page=$folder/report.md
  if [[ -n $folder && -f $page ]] && (($(wc -c <"$page") < LIMIT)); then
    cat -- "$page"
  else
    printf '### verdict=%s: the gate ended with exit code %s; its log says why\n' "$1" "$2"
  fi
}

folder=""
case $report in
  /*) place=$report ;;
  *) place=$PWD/$report ;;
esac
# A name that an output or the pattern of an upload would read as something else.
if [[ $place == *[[:cntrl:]]* || $place == *[*?\[\]]* ]]; then
  refuse 'GATE_REPORT leads to a name with a control character or one of * ? [ ]; give another'
fi
folder=$place
fresh=no
[[ -e $folder ]] || fresh=yes
rm -f -- "$folder"/result.json "$folder"/report.md "$folder"/report.html "$folder"/junit.xml ||
  refuse 'an earlier report cannot be removed'

python=${GATE_PYTHON:-}
if [[ $python =~ ^[0-9]+(\.[0-9]+)*$ ]]; then
  python=python$python
fi
if [[ -n $python ]] && ! command -v -- "$python" >/dev/null; then
  refuse "no interpreter $(printf %q "$python"); give a path, or a version that is on PATH"
fi

if [[ $install != none ]]; then
  python=${python:-python3}
  requirements=()
  while IFS= read -r line; do
    if [[ -n ${line//[[:space:]]/} ]]; then
      requirements+=("$line")
    fi
  done <<<"$install"
  if ((${#requirements[@]} == 0)); then
    requirements=("${here%/*}")
  fi
  "$python" -m pip install --quiet --disable-pip-version-check -- "${requirements[@]}" ||
    refuse 'pip could not install what GATE_INSTALL names'
fi

if [[ -n $python ]]; then
  gate=("$python" -P -m verify) # -P: a file verify.py here is not the package
elif command -v verify >/dev/null; then
  gate=(verify)
else
  gate=(python3 -P -m verify)
fi

arguments=(gate "--config=$config" "--report=$folder")
if [[ -n ${GATE_SINCE:-} ]]; then
  arguments+=("--since=$GATE_SINCE")
fi
code=0
"${gate[@]}" "${arguments[@]}" || code=$?
if [[ $fresh == yes && -d $folder ]]; then
  printf '*\n' >"$folder/.gitignore" # no part of the repository that it may lie in
fi
if [[ $code == [013] && ! -f $folder/result.json ]]; then
  refuse "it ended with $code and left no result: is verify installed for that interpreter?"
fi
conclude "$code"
