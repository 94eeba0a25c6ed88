//! A VMM: connects, sets up queues, and at random stops, resets or changes them.

use std::os::fd::AsRawFd;

use exports::vhost_user::session::{
    VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_RING_EVENT_IDX,
    VIRTIO_F_RING_INDIRECT_DESC, protocol_features,
};
use exports::vhost_user::wire::Request;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::queue::Queue;
use super::vmm::{Connection, Gone};
use super::{Guest, USER_BASE};
use crate::fds::Kept;

/// How a VMM disturbs the device while its guest works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// Stops one queue and starts it again.
    StopQueue,
    /// Pauses its guest and stops all queues, which completes all requests. Then resumes.
    StopAll,
    /// Closes the connection without a message, as a killed VMM, and connects again.
    Vanish,
    /// Resets the device by status 0.
    Status,
    /// Resets the device by RESET_DEVICE.
    Reset,
    /// Replaces the memory table.
    Memory,
    /// Plugs memory and unplugs it.
    Plug,
    /// Switches the write cache on or off.
    WriteCache,
    /// Disables a queue for a while.
    Disable,
    /// Replaces a queue's call eventfd.
    Call,
    /// Replaces a queue's kick eventfd. Only in some worlds: [`Plan::replace_kicks`](super::Plan::replace_kicks).
    Kick,
    /// Sends task management functions of virtio-scsi. Only in some worlds.
    Tasks,
}

impl Disturbance {
    pub(super) const ALL: &[Disturbance] = &[
        Disturbance::StopQueue,
        Disturbance::StopAll,
        Disturbance::Vanish,
        Disturbance::Status,
        Disturbance::Reset,
        Disturbance::Memory,
        Disturbance::Plug,
        Disturbance::WriteCache,
        Disturbance::Disable,
        Disturbance::Call,
    ];
}

/// Offset of the `writeback` field in virtio-blk's configuration space (5.2.4).
const WRITEBACK: u32 = 32;

/// Address of plugged memory, and its length.
const PLUGGED: u64 = 1 << 40;
const PLUGGED_LEN: u64 = 0x1000;

impl Guest {
    /// The actor's main function.
    pub(super) fn run(&self) {
        let world = self.world();
        while self.life().is_err() {
            world.coverage.gone.one();
            if !self.vanished.take() && world.losses() == self.connected.get() {
                world.fail(&format!(
                    "the daemon has closed the connection of guest {}",
                    self.shared.guest
                ));
            }
            world.machine.sleep(10_000);
        }
        self.done.set(true);
    }

    /// Runs one connection.
    fn life(&self) -> Result<(), Gone> {
        let world = self.world();
        self.connected.set(world.losses());
        let mut connection = Connection::new(world, self.shared.guest);
        world.coverage.connections.one();
        world.machine.say(|| format!("guest {} connects", self.shared.guest));
        self.negotiate(&mut connection)?;
        let (kills, cuts) = (world.kills(), world.cuts());
        if self.cuts.replace(cuts) != cuts {
            // The guest was restarted by the power cut. Drop what the lost connection left.
            self.kills.set(kills);
            self.shared.write_through.set(None);
            self.forget_all();
        } else if self.kills.replace(kills) != kills && !self.shared.plan.inflight {
            // No record of requests in flight is left, so the guest is restarted.
            world.coverage.lost.one();
            self.shared.write_through.set(None);
            self.forget_all();
        }
        self.set_up(&connection)?;
        let Self { shared, .. } = self;
        let (random, plan) = (world.random(), &shared.plan);
        while self.queues.iter().any(|queue| world.is_there(queue.actor.get())) {
            self.leave_alone(&connection, random.between(plan.calm_ns / 4, plan.calm_ns))?;
            if !plan.disturbances.is_empty() {
                let disturbance = random.pick(&plan.disturbances);
                world.machine.say(|| format!("guest {}: {disturbance:?}", shared.guest));
                self.disturb(&mut connection, disturbance)?;
                shared.undisturbed_ns.set(world.machine.now_ns());
            }
        }
        for queue in &self.queues {
            connection.ask(Request::GetVringBase, &u32s(&[queue.index.into(), 0]))?;
        }
        Ok(())
    }

    /// Lets the guest work for `ns` nanoseconds, or until it has finished.
    fn leave_alone(&self, connection: &Connection, ns: u64) -> Result<(), Gone> {
        let world = self.world();
        let until = world.machine.now_ns() + ns;
        while world.machine.now_ns() < until
            && self.queues.iter().any(|queue| world.is_there(queue.actor.get()))
        {
            connection.check()?;
            world.machine.sleep((ns / 2).clamp(100_000, 1_000_000));
        }
        Ok(())
    }

    fn negotiate(&self, connection: &mut Connection) -> Result<(), Gone> {
        let protocol = connection.ask_number(Request::GetProtocolFeatures)?;
        let wanted = match self.shared.plan.inflight {
            true => protocol,
            false => protocol & !protocol_features::INFLIGHT_SHMFD,
        };
        connection.tell(Request::SetProtocolFeatures, &wanted.to_ne_bytes(), &[])?;
        connection.has_reply_ack();
        connection.tell(Request::SetOwner, &[], &[])
    }

    /// Sets the device up, from features to queues.
    fn set_up(&self, connection: &Connection) -> Result<(), Gone> {
        let plan = &self.shared.plan;
        let mut features = connection.ask_number(Request::GetFeatures)?;
        assert!(features & VHOST_USER_F_PROTOCOL_FEATURES != 0);
        // Only VMMs that migrate their guest have writes logged.
        features &= !VHOST_F_LOG_ALL;
        if !plan.event_idx {
            features &= !VIRTIO_F_RING_EVENT_IDX;
        }
        if plan.indirect == 0 {
            features &= !VIRTIO_F_RING_INDIRECT_DESC;
        }
        connection.tell(Request::SetFeatures, &features.to_ne_bytes(), &[])?;
        self.set_memory(connection)?;
        if plan.inflight {
            self.set_inflight(connection)?;
        }
        for queue in self.queues.iter().chain(&self.control) {
            let (available, used) = {
                let driver = queue.driver.borrow();
                (driver.available(), driver.device_used())
            };
            let base = if plan.begins_at_available { available } else { used };
            self.world().coverage.behind.add((base != used).into());
            self.start_queue(connection, queue, base)?;
        }
        self.shared.undisturbed_ns.set(self.world().machine.now_ns());
        Ok(())
    }

    fn set_memory(&self, connection: &Connection) -> Result<(), Gone> {
        let mut payload = u32s(&[1, 0]);
        payload.extend(u64s(&[0, self.memory_len, USER_BASE, 0]));
        connection.tell(Request::SetMemTable, &payload, &[self.memory.as_raw_fd()])
    }

    fn set_inflight(&self, connection: &Connection) -> Result<(), Gone> {
        let plan = &self.shared.plan;
        let known = self.inflight.borrow().clone();
        let (description, fd) = match known {
            Some(known) => known,
            None => {
                let mut payload = u64s(&[0, 0]);
                payload.extend((plan.device.first_queue() + plan.queues).to_ne_bytes());
                payload.extend(plan.queue_size.to_ne_bytes());
                let (description, fd) = connection.ask_with_fd(Request::GetInflightFd, &payload)?;
                let made = (description, fd.expect("memory comes along"));
                self.inflight.replace(Some(made.clone()));
                made
            }
        };
        connection.tell(Request::SetInflightFd, &description, &[fd.as_raw_fd()])
    }

    fn start_queue(&self, connection: &Connection, queue: &Queue, base: u16) -> Result<(), Gone> {
        let config = queue.driver.borrow().config();
        let index = u32::from(queue.index);
        let (kick, call) = (Kept::eventfd(&self.world().fds), Kept::eventfd(&self.world().fds));
        connection.tell(Request::SetVringNum, &u32s(&[index, config.size.into()]), &[])?;
        connection.tell(Request::SetVringBase, &u32s(&[index, base.into()]), &[])?;
        let mut addr = u32s(&[index, 0]);
        addr.extend(u64s(&[config.desc, config.used, config.avail, 0]));
        connection.tell(Request::SetVringAddr, &addr, &[])?;
        let number = u64s(&[index.into()]);
        // The driver uses the new eventfds before the device knows them.
        queue.call.replace(Some(call.clone()));
        connection.tell(Request::SetVringCall, &number, &[call.as_raw_fd()])?;
        queue.kick.replace(Some(kick.clone()));
        connection.tell(Request::SetVringKick, &number, &[kick.as_raw_fd()])?;
        connection.tell(Request::SetVringEnable, &u32s(&[index, 1]), &[])?;
        // The interrupt is the only wake-up of a sleeping driver. The device owes one for requests answered before.
        if queue.paused.replace(false) {
            queue.wake();
        }
        Ok(())
    }

    /// Stops a queue. Returns its base: the index of the first available entry not yet taken.
    fn stop_queue(&self, connection: &Connection, queue: &Queue) -> Result<u16, Gone> {
        let answer = connection.ask(Request::GetVringBase, &u32s(&[queue.index.into(), 0]))?;
        let mut base = [0; 4];
        base.copy_from_slice(&answer[4..8]);
        queue.kick.replace(None);
        Ok(u32::from_ne_bytes(base) as u16)
    }

    /// Forgets all requests in flight, after a reset of the devices.
    pub(super) fn forget_all(&self) {
        self.queues.iter().for_each(|queue| queue.renew());
        self.control.iter().for_each(|queue| queue.empty());
        self.shared.managing.set(false);
        self.inflight.replace(None);
    }

    fn disturb(&self, connection: &mut Connection, what: Disturbance) -> Result<(), Gone> {
        let world = self.world();
        let coverage = &world.coverage;
        let random = world.random();
        let queue = &self.queues[random.below(self.queues.len() as u64) as usize];
        let number = u64s(&[queue.index.into()]);
        let pause = random.pick(&[0, 1_000, 200_000]);
        match what {
            Disturbance::StopQueue => {
                coverage.stopped_queues.one();
                let base = self.stop_queue(connection, queue)?;
                world.machine.sleep(pause);
                self.start_queue(connection, queue, base)?;
            }
            Disturbance::StopAll => {
                coverage.stopped_guests.one();
                self.queues.iter().for_each(|queue| queue.paused.set(true));
                let mut bases = Vec::new();
                for queue in &self.queues {
                    let base = self.stop_queue(connection, queue)?;
                    queue.check_stopped(base);
                    bases.push(base);
                }
                world.machine.sleep(pause);
                for (queue, base) in self.queues.iter().zip(bases) {
                    self.start_queue(connection, queue, base)?;
                }
            }
            Disturbance::Vanish => {
                coverage.vanished.one();
                self.vanished.set(true);
                return Err(Gone);
            }
            Disturbance::Status | Disturbance::Reset => {
                coverage.resets.one();
                self.shared.write_through.set(None);
                self.queues.iter().for_each(|queue| queue.paused.set(true));
                match what {
                    Disturbance::Reset => connection.tell(Request::ResetDevice, &[], &[])?,
                    _ => connection.tell(Request::SetStatus, &u64s(&[0]), &[])?,
                }
                self.forget_all();
                self.set_up(connection)?;
            }
            Disturbance::Memory => {
                coverage.memory_tables.one();
                self.set_memory(connection)?;
            }
            Disturbance::Plug => {
                coverage.plugged.one();
                let file = memfd_create(c"sim-guest-plugged", MFdFlags::MFD_CLOEXEC);
                let file = Kept::new(&world.fds, file.expect("a memfd"));
                nix::unistd::ftruncate(&**file, PLUGGED_LEN.cast_signed()).expect("memory");
                let region = u64s(&[0, PLUGGED, PLUGGED_LEN, USER_BASE + PLUGGED, 0]);
                connection.tell(Request::AddMemReg, &region, &[file.as_raw_fd()])?;
                world.machine.sleep(pause);
                connection.tell(Request::RemMemReg, &region, &[])?;
            }
            Disturbance::WriteCache => {
                coverage.write_caches.one();
                let mut payload = u32s(&[WRITEBACK, 1, 0]);
                let write_back = random.below(2) as u8;
                payload.push(write_back);
                self.shared.write_through.set(None);
                connection.tell(Request::SetConfig, &payload, &[])?;
                self.shared.write_through.set((write_back == 0).then(|| world.machine.steps()));
            }
            Disturbance::Disable => {
                coverage.disabled.one();
                let index = u32::from(queue.index);
                connection.tell(Request::SetVringEnable, &u32s(&[index, 0]), &[])?;
                queue.disabled.set(true);
                world.machine.sleep(pause);
                queue.disabled.set(false);
                connection.tell(Request::SetVringEnable, &u32s(&[index, 1]), &[])?;
            }
            Disturbance::Call => {
                coverage.calls.one();
                let call = Kept::eventfd(&self.world().fds);
                queue.call.replace(Some(call.clone()));
                // Until the device receives the new eventfd, its signals to the old one are lost.
                world.machine.sleep(pause);
                connection.tell(Request::SetVringCall, &number, &[call.as_raw_fd()])?;
            }
            Disturbance::Tasks => self.manage_tasks(connection)?,
            Disturbance::Kick => {
                coverage.kick_fds.one();
                let kick = Kept::eventfd(&self.world().fds);
                // Until the device receives the new eventfd, the driver kicks the old one, the new one or none.
                // Each of these kicks may be lost: the device checks the queue when it receives the eventfd.
                match random.below(3) {
                    0 => {}
                    1 => drop(queue.kick.replace(Some(kick.clone()))),
                    _ => drop(queue.kick.replace(None)),
                }
                world.machine.sleep(pause);
                queue.kick.replace(Some(kick.clone()));
                connection.tell(Request::SetVringKick, &number, &[kick.as_raw_fd()])?;
                // Other disturbances would make the device check the queue. Wait until it has done so by itself.
                let told_ns = world.machine.now_ns();
                self.shared.undisturbed_ns.set(told_ns);
                while queue.has_one_offered_by(told_ns) {
                    connection.check()?;
                    world.machine.sleep(50_000);
                }
            }
        }
        Ok(())
    }
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn u64s(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
