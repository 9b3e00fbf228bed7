# The steps of a set-up: each is done once, says so in a line, and shows why it failed. Sourced by setup.sh, which sets
# $venv (the virtual environment), $log (a file), $steps (how many there are) and $mode (what a stamp depends on).

step=0

# die WHAT REPAIR: the end, for a failure that the user can mend.
die() {
  printf '\nset-up stopped: %s\n    what to do: %s\n   the whole log: %s\n' "$1" "$2" "$log" >&2
  exit 1
}

# key FILE...: another one whenever a file or the mode changes.
key() { { cat "$@" && echo "$mode"; } | sha256sum | cut -c1-16; }

# stamped NAME KEY: whether a step ran through before with the same key.
stamped() { [ "$(cat "$venv/.stamps/$1" 2>/dev/null)" = "$2" ]; }

# once NAME KEY TEXT COMMAND...: runs the command, unless it ran through before with the same key.
once() {
  local name=$1 key=$2 text=$3
  shift 3
  step=$((step + 1))
  stamped "$name" "$key" && return
  printf '[%d/%d] %s\n' "$step" "$steps" "$text"
  "$@" || return
  echo "$key" >"$venv/.stamps/$name"
}

# progress: a compiler's percentage if the log tells one, else the log's last line.
progress() {
  local recent
  recent=$(tail -n 100 "$log")
  { grep -o '\[ *[0-9]*%\].*' <<<"$recent" || echo "$recent"; } | tail -n 1 | cut -c1-100
}

# watched COMMAND...: its output goes to the log.
watched() {
  local from
  from=$(($(wc -l <"$log") + 1))
  echo "\$ $*" >>"$log"
  "$@" >>"$log" 2>&1 &
  shown $! "$from"
}

# shown PID FROM: waits for a command that writes to the log; every 20 s a line says how far it is. On failure, its last
# lines from line FROM on.
shown() {
  local pid=$1 from=$2 began=$SECONDS next=20 status=0
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS - began >= next)); then
      printf '      %3d s: %s\n' $((SECONDS - began)) "$(progress)"
      next=$((next + 20))
    fi
  done
  wait "$pid" || status=$?
  [ $status = 0 ] && return
  printf '      failed after %d s; its last lines:\n' $((SECONDS - began)) >&2
  tail -n +"$from" "$log" | tail -n 12 | cut -c1-200 | sed 's/^/      | /' >&2
  return $status
}

# beside LOG COMMAND...: starts a command that runs beside the next steps, with a log of its own. `joined LOG` waits for
# it. Its processes end with the set-up: they are a group of their own, which a Ctrl-C does not reach.
beside() {
  local log=$1
  shift
  set -m
  "$@" >"$log" 2>&1 &
  set +m
  apart=$!
  trap 'kill -- -"$apart" 2>/dev/null' EXIT
}

joined() {
  local log=$1
  shown "$apart" 1
}
