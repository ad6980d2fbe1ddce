#!/usr/bin/env bash
# 8 × TPU v4 on 2 hosts, one process per host.
# Made by fiddlex launch. To start it: bash THIS_FILE, from a host that reaches all by ssh without a password.

set -u
grace=300 # seconds to save in
environment=''
task='python -P -m fiddlex launch task --max_restarts=100 --elastic -- train --config=gpt_tiny --workdir=/shared/run '"'"'--config.data.source=text:/shared/a file'"'"' --coordinator_address=node0:12345 --num_processes=2'
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

start 0 node0
start 1 node1

status=0 running=2
while ((running)); do
    if read -r -t 1 rank code <&8; then
        running=$((running - 1))
        if ((code)); then echo "rank $rank has ended with status $code" >&2; fi
        if ((rank == 0)); then status=$code; fi
    fi
done
exit "$status"
