# What a machine whose process 1 is systemd does with the units of packaging/systemd. Each step that has passed is a
# line. The units, the program and disk-load are where a package would put them.

trap 'status=$?; [ $status = 0 ] || { systemctl status "ringmill*" --no-pager; tail -n 60 /log; dmesg | tail -n 40; }; exit $status' EXIT

# Who would ask for a password is not here.
systemctl() { command systemctl --no-ask-password "$@"; }

property() { systemctl show --value -p "$2" "$1"; }

# again PID: before one looks again; without that process there is nothing to wait for.
again() {
    kill -0 "$1"
    usleep 50000
}

# load SOCKET: starts a front end, or more of one than there is, and waits until it has got somewhere.
load() {
    progress=/tmp/$(basename "$1").progress
    rm -f "$progress"
    disk-load "$1" "$progress" &
    load=$!
    until [ -s "$progress" ]; do again $load; done
    goes_on
}

# Waits until the front end has written and read more, all of it right.
goes_on() {
    before=$(cat "$progress")
    until [ "$(cat "$progress")" -gt "$before" ]; do again $load; done
}

end_load() {
    goes_on
    kill $load
    wait $load || true
}

is() {
    for pair; do
        found=$(property "$unit" "${pair%%=*}")
        [ "$found" = "${pair#*=}" ] || { echo "$unit: ${pair%%=*} is $found, not ${pair#*=}"; return 1; }
    done
}

# All that the daemon and the kernel say of who it is. To be called once for each daemon that systemd has started.
daemons=0
is_confined() {
    pid=$(property "$unit" MainPID)
    status=/proc/$pid/status
    grep -q '^NoNewPrivs:.1$' $status
    grep -q '^Seccomp:.2$' $status
    grep -q '^CapEff:.0*$' $status
    grep -q "^Uid:.$(id -u ringmill)[^0-9]" $status
    daemons=$((daemons + 1))
    line='sandbox: no_new_privs, capabilities none, seccomp (.*Landlock ABI.*ring restrictions$'
    # Who has taken over says so when it serves already.
    until [ "$(grep -c "$line" /log)" -ge $daemons ]; do again "$pid"; done
}

upgrades() {
    before=$(property "$unit" MainPID)
    for _ in 1 2; do
        systemctl reload "$unit"
        after=$(property "$unit" MainPID)
        [ "$after" != "$before" ]
        grep -q "/$unit$" "/proc/$after/cgroup"
        goes_on
        is ActiveState=active SubState=running NRestarts=0 Result=success
        is_confined
        before=$after
    done
}

# What the daemons say: there is no journal here.
for service in ringmill ringmill@; do
    mkdir -p /run/systemd/system/$service.service.d
    printf '[Service]\nStandardOutput=append:/log\nEnvironment=RINGMILL_LOG=info\n' >/run/systemd/system/$service.service.d/log.conf
done
systemctl daemon-reload
systemd-sysusers
systemd-tmpfiles --create ringmill.conf
for name in one two; do
    truncate -s 1M /var/lib/ringmill/$name.img
    # The guest's files are in memory, which O_DIRECT is not for in Linux 6.1.
    echo 'RINGMILL_OPTIONS=--cache writeback' >/etc/ringmill/$name.conf
done
chown ringmill:ringmill /var/lib/ringmill /var/lib/ringmill/*

systemctl start ringmill@one.socket ringmill@two.socket
unit=ringmill@one.service
is ActiveState=inactive
[ "$(stat -c %a:%U:%G /run/ringmill/one.sock)" = 660:root:kvm ]
load /run/ringmill/one.sock
is ActiveState=active SubState=running "StatusText=Serving 1 export"
is_confined
[ "$(property ringmill@two.service ActiveState)" = inactive ]
echo 'started by the first front end'

upgrades
echo 'reloaded under load'

end_load
systemctl stop $unit
is ActiveState=inactive Result=success
# What a daemon that was killed leaves to the next one stays; this one has left nothing.
[ ! -e /run/ringmill/one/pid ] && [ -z "$(ls -A /run/ringmill/one/journals)" ]
echo 'stopped'

cat >/etc/ringmill/ringmill.conf <<END
RINGMILL_OPTIONS="--object iothread,id=io0 \
    --blockdev file,node-name=a,filename=/var/lib/ringmill/a.img,cache.direct=off \
    --blockdev file,node-name=b,filename=/var/lib/ringmill/b.img,cache.direct=off \
    --export vhost-user-blk,id=a,node-name=a,writable=on,iothread=io0,addr.type=unix,addr.path=/run/ringmill/exports/a.sock"
END
for name in a b; do
    truncate -s 1M /var/lib/ringmill/$name.img
    chown ringmill:ringmill /var/lib/ringmill/$name.img
done
unit=ringmill.service
exports_are_for_kvm() { [ "$(stat -c %a:%U:%G /run/ringmill/exports/a.sock)" = 770:ringmill:kvm ]; }
for action in start restart; do
    systemctl $action $unit
    is ActiveState=active "StatusText=Serving 1 export"
    exports_are_for_kvm
done
systemctl stop $unit ringmill.socket
daemons=$(grep -c 'sandbox: no_new_privs' /log)
echo 'the group kvm may use exports'

if [ -z "$long" ]; then
    echo 'all is well'
    exit
fi

unit=ringmill@one.service
load /run/ringmill/one.sock
is ActiveState=active NRestarts=0
is_confined
echo 'started again'
upgrades

kill -KILL "$(property $unit MainPID)"
kill $load
wait $load || true
# Who connects meanwhile waits.
load /run/ringmill/one.sock
is NRestarts=1 ActiveState=active
is_confined
echo 'killed after reloads, and restarted'
end_load

unit=ringmill.service
systemctl start ringmill.socket
is ActiveState=inactive
# The first one has it started, and may not wait for as long as that takes here.
until ringmill ctl /run/ringmill/qmp.sock x-query-sandbox; do again 1; done
is ActiveState=active "StatusText=Serving 1 export"
is_confined
# Nobody else's sockets have become the daemon's.
[ "$(stat -c %a:%U:%G /run/ringmill/two.sock)" = 660:root:kvm ]
[ "$(stat -c %a:%U:%G /run/ringmill/qmp.sock)" = 600:root:root ]
load /run/ringmill/exports/a.sock
upgrades
end_load
exports_are_for_kvm
echo 'one for all: reloaded under load'

systemctl stop $unit
sed -i 's/--object iothread/--objekt iothread/' /etc/ringmill/ringmill.conf
# Has systemd start the daemon, and may not wait for as long as it takes.
ringmill ctl /run/ringmill/ctl.sock query-version &
waits=$!
until [ "$(property $unit NRestarts)" -ge 14 ]; do again 1; done
[ "$(property ringmill.socket ActiveState)" = active ]
sed -i 's/--objekt iothread/--object iothread/' /etc/ringmill/ringmill.conf
until [ "$(property $unit ActiveState)" = active ]; do again 1; done
wait $waits || true
is_confined
echo 'a typo in the options: tried again, with its sockets, until the options are right'

# Processes of others are hidden from the daemon (ProtectProc=): what they have locked is not taken for what a killed
# daemon has left behind, for which it would wait.
ringmill storage-daemon --pidfile /run/other.pid \
    --blockdev file,node-name=x,filename=/var/lib/ringmill/two.img,locking=on &
other=$!
until [ -s /run/other.pid ]; do again $other; done
chmod 666 /var/lib/ringmill/two.img
ringmill ctl /run/ringmill/qmp.sock blockdev-add driver=file node-name=x filename=/var/lib/ringmill/two.img \
    >/run/refused 2>&1 && exit 1
cat /run/refused
grep -q 'not all of /proc may be read' /run/refused
kill $other
wait $other || true
echo 'refused an image of a hidden process at once'

printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/ringmill.service.d/watchdog.conf
sed -i 's|"$| --nbd-server addr.type=unix,addr.path=/run/ringmill/exports/nbd.sock --export nbd,id=b,node-name=b,writable=on"|' \
    /etc/ringmill/ringmill.conf
systemctl daemon-reload
systemctl restart $unit
ringmill storage-daemon \
    --blockdev nbd,node-name=b,server.type=unix,server.path=/run/ringmill/exports/nbd.sock,export=b,reconnect-delay=100 \
    --export vhost-user-blk,id=e,node-name=b,writable=on,addr.type=unix,addr.path=/tmp/b.sock &
client=$!
until [ -S /tmp/b.sock ]; do again $client; done
load /tmp/b.sock
stopped=$(property $unit MainPID)
kill -STOP "$stopped"
until [ "$(property $unit MainPID)" != "$stopped" ] && [ "$(property $unit ActiveState)" = active ]; do again $client; done
dmesg | grep 'Watchdog timeout'
goes_on
end_load
kill $client
wait $client || true
echo 'ended by the watchdog and restarted, its NBD client went on'

if grep 'sandbox: refused' /log; then exit 1; fi
systemctl stop $unit
is ActiveState=inactive Result=success
echo 'all is well'
