# What jobs of a daemon in the guest have in common.
qmp=/tmp/qmp
mkdir -p /dev/shm

# storage OPTION...: starts a daemon in the background.
storage() {
    rm -f $qmp
    ringmill storage-daemon --object iothread,id=io0 --object iothread,id=io1 \
        --chardev socket,id=q,path=$qmp,server=on,wait=off --monitor chardev=q "$@" >>/tmp/log 2>&1 &
    daemon=$!
}

# stacks: prints what the kernel does for each thread of the daemons.
stacks() {
    for thread in $(pidof ringmill | sed 's|[0-9]*|/proc/&/task/*|g'); do
        echo "$(cat $thread/comm): $(head -n 4 $thread/stack)"
    done
    ls /dev/ublk* /dev/vduse
}

# until_true COMMAND...: returns once it succeeds. What it looks at has no event that a shell could wait for.
until_true() {
    left=600
    until "$@" 2>/dev/null; do
        left=$((left - 1))
        [ $left -gt 0 ] || { echo "waited in vain: $*"; cat /tmp/log; stacks; exit 1; }
        sleep 0.1
    done
}

serving() {
    until_true test -b /dev/$disk
    until_true test -S $qmp
}

ctl() {
    ringmill ctl $qmp "$@"
}

# refused TEXT COMMAND...: the command fails, and says so with this text.
refused() {
    text=$1
    shift
    "$@" >/tmp/refused 2>&1 && { echo "not refused: $*"; exit 1; }
    grep -qF "$text" /tmp/refused || { echo "not '$text':"; cat /tmp/refused; exit 1; }
}
