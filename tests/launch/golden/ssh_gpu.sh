#!/usr/bin/env bash
# 16 × H100-SXM5-80GB on 2 hosts, 2 processes per host.
# Made by fiddlex launch. To start it: bash THIS_FILE, from a host that reaches all by ssh without a password.

set -u
grace=300 # seconds to save in
environment=''"'"'GREETING=it'"'"'"'"'"'"'"'"'s $HOME'"'"''
task='python -P -m fiddlex launch task --max_restarts=100 -- train --config=gpt_tiny --workdir=/shared/run --config.mesh.data=4 --coordinator_address=node0:12345 --num_processes=4'
remote='grace=$0
exec 3<&0
"$@" </dev/null 3<&- & task=$!
{
    while read -r _; do :; done <&3
    kill -TERM "$task"
    sleep "$grace" 3<&-
    kill -KILL "$task"
} >/dev/null 2>&1 & watch=$!
wait "$task"; status=$?
kill "$watch"
exit "$status"
'

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
mkfifo "$folder/hold" "$folder/ended"
exec 9<>"$folder/hold" 8<>"$folder/ended" # 9 is open as long as the tasks shall run; 8 tells how they end

start() { # rank, host, further variables
    {
        ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$2" \
            "env $environment ${3:-} bash -c '$remote' $grace $task --process_id=$1" <"$folder/hold" 8>&-
        echo "$1 $?" >&8
    } 9>&- &
}

end_all() { exec 9>&-; }
trap end_all TERM INT HUP USR1

start 0 me@node0 JAX_LOCAL_DEVICE_IDS=0,1,2,3
start 1 me@node0 JAX_LOCAL_DEVICE_IDS=4,5,6,7
start 2 me@node1 JAX_LOCAL_DEVICE_IDS=0,1,2,3
start 3 me@node1 JAX_LOCAL_DEVICE_IDS=4,5,6,7

status=0 running=4 deadline=
while ((running)); do
    if read -r -t 1 rank code <&8; then
        running=$((running - 1))
        if ((code)); then echo "rank $rank has ended with status $code" >&2; fi
        if ((status == 0)); then status=$code; fi
        case $code in
            0 | 129 | 130 | 138 | 143) deadline=${deadline:-$((SECONDS + grace))} ;; # the others end by themselves
            *) end_all ;;
        esac
    fi
    if [[ -n $deadline ]] && ((SECONDS >= deadline)); then end_all; fi
done
exit "$status"
