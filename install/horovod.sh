# Horovod: built once per machine, kept as a wheel in the user's cache. Sourced by setup.sh.

horovod_version=$(sed -n 's/^horovod==//p' "$here/requirements-horovod.txt")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/distseg/wheels

# horovod_folder: the folder of the wheel that fits this machine's Python, torch and MPI; made where there is none.
horovod_folder() {
  local name
  name=$("$python" "$here/horovod_key.py" "$horovod_version") && mkdir -p "$cache/$name" && echo "$cache/$name"
}

horovod_lock() {
  exec 8>"$cache/lock"
  if command -v flock >/dev/null && ! flock -n 8; then
    echo "another set-up builds Horovod; waiting for its wheel"
    flock 8
  fi
}

# horovod_wheel: makes the wheel where there is none yet. Needs torch, MPI and the tools, but none of the other packages.
horovod_wheel() {
  local folder
  folder=$(horovod_folder) || return
  horovod_lock
  ls "$folder"/*.whl 2>/dev/null || horovod_build "$folder"
}

horovod_install() {
  local folder wheel
  folder=$(horovod_folder) || return
  horovod_lock
  wheel=$(ls "$folder"/*.whl 2>/dev/null | head -n 1)
  if [ -n "$wheel" ]; then
    echo "found $wheel"
    horovod_try "$wheel" && return
    echo "it does not load; building it anew"
  fi
  horovod_build "$folder" && horovod_try "$folder"/*.whl
}

horovod_try() {
  pip_install --no-deps --force-reinstall "$1" &&
    "$python" -c 'import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; import horovod.torch'
}

# The wheel is made in a folder of its own and then renamed: no one ever sees half of it.
horovod_build() {
  local folder=$1 work status=0
  command -v "${CXX:-c++}" >/dev/null || { echo "no C++ compiler: ${CXX:-c++} is not on PATH"; return 1; }
  work=$(mktemp -d "$cache/building.XXXXXX") || return
  trap "rm -rf '$work'" EXIT # of the subshell that the build runs in
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_GLOO=1 \
    CMAKE_TOOLCHAIN_FILE=$here/toolchain.cmake TMPDIR=$work \
    "$python" -m pip wheel -v --no-cache-dir --no-deps --no-build-isolation --no-binary horovod \
    --disable-pip-version-check --progress-bar off --wheel-dir "$work" "horovod==$horovod_version" &&
    rm -f "$folder"/*.whl && mv "$work"/*.whl "$folder/" || status=$?
  rm -rf "$work"
  return $status
}
