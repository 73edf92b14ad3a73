#!/bin/sh
# Usage: requirements/setup.sh lab|test|server
# Makes .venv (lab; test adds to it) or .venv-server from the lock files of this folder. An environment that is already
# right is left alone, in no time. Its stamp is written last: what was interrupted is made anew, never taken for whole.
set -eu
cd "$(dirname "$0")/.."
what=$1

say() { printf '%s\n' "$*" >&2; }

# Bytecode is written by importing everything once (below), quicker than pip's compiling of all there is.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

find_python() {
    for python in ${PYTHON:+"$PYTHON"} ${PYTHON:-python3.11 python3.12 python3}; do
        if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            2>/dev/null; then
            return
        fi
    done
    say "eaglelab: needs Python 3.11 or 3.12 with venv (Debian, Ubuntu: apt install python3.11-venv); found none as" \
        "${PYTHON:-python3.11, python3.12 or python3}. Name one: make PYTHON=/path/to/python3.11 ..."
    exit 2
}

# What an environment must have been made from: these files, in this place (scripts hold absolute paths).
wanted() { { pwd; cat "$0" "$@"; } | cksum; }

is_ready() { # ENV STAMP WANTED
    [ "$(cat "$1/$2" 2>/dev/null)" = "$3" ] && "$1/bin/python" -c '' 2>/dev/null
}

pip() { # ENV arguments
    venv=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-compile "$@"
}

add_project() { # ENV flags of pip: only this, when nothing but a pyproject.toml has changed
    project=$(wanted pyproject.toml eaglelab_cpu/pyproject.toml)
    is_ready "$1" project.stamp "$project" && return
    rm -f "$1/project.stamp"
    pip "$1" --no-deps --no-build-isolation "$2" "$3" ${4:+"$4" "$5"}
    printf '%s\n' "$project" >"$1/project.stamp"
}

create() { # ENV LOCK
    find_python
    rm -rf "$1"
    "$python" -m venv "$1"
    # torch with whatever it needs here (a CUDA build needs more than the lock names), the rest exactly as locked.
    pip "$1" -c "$2" torch
    pip "$1" --no-deps -r "$2"
}

folder=$(basename "$PWD")
case $what in
lab)
    stamp=$(wanted requirements/lab.txt)
    if is_ready .venv lab.stamp "$stamp"; then
        add_project .venv -e .
        exit 0
    fi
    say "Setting up $folder/.venv, the lab (1-2 minutes, 1.3 GB) ..."
    create .venv requirements/lab.txt
    add_project .venv -e .
    .venv/bin/python -c 'import torch, pandas, matplotlib.pyplot, papermill, nbconvert, ipywidgets, ipykernel.kernelapp'
    printf '%s\n' "$stamp" >.venv/lab.stamp
    ;;
test)
    requirements/setup.sh lab
    stamp=$(wanted requirements/lab.txt requirements/test.txt)
    is_ready .venv test.stamp "$stamp" && exit 0
    say "Adding to $folder/.venv what tests and training need (half a minute, 0.3 GB) ..."
    rm -f .venv/test.stamp
    pip .venv --no-deps -r requirements/test.txt
    printf '%s\n' "$stamp" >.venv/test.stamp
    ;;
server)
    if [ -n "${EAGLELAB_SERVER_PYTHON:-}" ]; then
        say "Using EAGLELAB_SERVER_PYTHON=$EAGLELAB_SERVER_PYTHON for the server."
        exit 0
    fi
    stamp=$(wanted requirements/server.txt)
    if is_ready .venv-server server.stamp "$stamp"; then
        add_project .venv-server -e . -e eaglelab_cpu
        exit 0
    fi
    say "Setting up $folder/.venv-server, genuine SGLang for the CPU (1-2 minutes, 2 GB) ..."
    create .venv-server requirements/server.txt
    add_project .venv-server -e . -e eaglelab_cpu
    SGLANG_USE_CPU_ENGINE=1 CUDA_VISIBLE_DEVICES='' TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 .venv-server/bin/python -c '
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
import sglang.srt.speculative.eagle_worker_v2, sglang.srt.models.registry as registry
registry.import_model_classes("sglang.srt.models")' >.venv-server/import.log 2>&1 || {
        say "SGLang does not import in .venv-server:"
        tail -n 20 .venv-server/import.log >&2
        exit 1
    }
    printf '%s\n' "$stamp" >.venv-server/server.stamp
    ;;
*)
    say "usage: requirements/setup.sh lab|test|server"
    exit 2
    ;;
esac
