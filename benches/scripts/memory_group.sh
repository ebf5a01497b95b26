# Shared by the scripts that run programs in a memory group of their own. Sourced, never run. Needs root; touches no group it did not make.

group=
# Makes a group of $1 bytes.
make_group() {
  local v1=/sys/fs/cgroup/memory v2=/sys/fs/cgroup name=ds4-bench-$$
  if [ -e "$v1/cgroup.procs" ] && mkdir "$v1/$name" 2>/dev/null; then
    group=$v1/$name
    echo "$1" >"$group/memory.limit_in_bytes"
  elif grep -qs memory "$v2/cgroup.subtree_control" && mkdir "$v2/$name" 2>/dev/null; then
    group=$v2/$name
    echo "$1" >"$group/memory.max"
    echo 0 >"$group/memory.swap.max"
  else
    return 1
  fi
}

# Runs a command inside the group.
in_group() {
  (
    echo "$BASHPID" >"$group/cgroup.procs"
    exec "$@"
  )
}

remove_group() {
  [ -n "$group" ] || return 0
  # The last process may still be on its way out.
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    rmdir "$group" 2>/dev/null && break
    sleep 0.2
  done
  group=
}

# Drops a file from the page cache, whoever put it there.
drop_file() {
  dd if="$1" iflag=nocache count=0 status=none
}
