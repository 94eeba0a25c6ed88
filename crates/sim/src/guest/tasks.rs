//! Task management by virtio-scsi's driver, over the control queue (virtio 1.3, 5.6.6.2; SAM-5, 7).

use queue::Segment;

use super::Guest;
use super::vmm::{Connection, Gone};
use crate::user::PATIENCE_NS;

/// Guest addresses of a request of the control queue, and of its response.
const REQUEST: u64 = 0x3_0000;
const RESPONSE: u64 = 0x3_0100;
/// Subtypes that end tasks: ABORT TASK (a single task), ABORT TASK SET, CLEAR TASK SET, I_T NEXUS RESET, LOGICAL
/// UNIT RESET.
const ENDING: &[u32] = &[ABORT_TASK, ABORT_TASK, 1, 3, 4, 5];
const ABORT_TASK: u32 = 0;
/// Subtypes that only query tasks.
const ASKING: &[u32] = &[QUERY_TASK, QUERY_TASK_SET];
const QUERY_TASK: u32 = 6;
const QUERY_TASK_SET: u32 = 7;
/// Responses.
const FUNCTION_COMPLETE: u8 = 0;
const FUNCTION_SUCCEEDED: u8 = 10;

impl Guest {
    /// Performs a task management function: ends tasks, or queries them.
    pub(super) fn manage_tasks(&self, connection: &Connection) -> Result<(), Gone> {
        let world = self.world();
        let random = world.random();
        if self.shared.managing.get() {
            // The response to a function of a killed daemon, which the next daemon has carried out.
            self.response(connection)?;
        }
        let queue = &self.queues[random.below(self.queues.len() as u64) as usize];
        let task = queue.any_task(random);
        let id = task.map_or(u64::MAX, |(slot, _)| slot.into());
        let function = random.pick(if random.one_in(4) { ASKING } else { ENDING });
        let ended: Vec<_> = match function {
            ABORT_TASK => task.into_iter().collect(),
            QUERY_TASK | QUERY_TASK_SET => Vec::new(),
            _ => self.queues.iter().flat_map(|queue| queue.tasks()).collect(),
        };
        self.ask(connection, function, id)?;
        let left = ended.iter().find(|task| self.queues.iter().any(|queue| queue.has_task(**task)));
        if let Some((slot, _)) = left {
            world.fail(&format!("function {function} has ended task {slot}, which is under way"));
        }
        Ok(())
    }

    /// Requests a function and waits for its end. By then, all ended tasks are answered.
    fn ask(&self, connection: &Connection, function: u32, id: u64) -> Result<(), Gone> {
        let (world, shared) = (self.world(), &self.shared);
        let Some(control) = &self.control else { return Ok(()) };
        let mut request = [0, function].map(u32::to_le_bytes).concat();
        // Target 0, logical unit 0.
        request.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        request.extend(id.to_le_bytes());
        shared.view.write_bytes(REQUEST, &request).expect("memory");
        shared.view.write_bytes(RESPONSE, &[0xff]).expect("memory");
        let readable = Segment { addr: REQUEST, len: request.len() as u32 };
        let writable = Segment { addr: RESPONSE, len: 1 };
        control.driver.borrow_mut().add(&[readable], &[writable]).expect("room");
        shared.managing.set(true);
        if control.driver.borrow_mut().publish() {
            control.kick();
        }
        world.machine.say(|| format!("guest {}: function {function} of {id}", shared.guest));
        let response = self.response(connection)?;
        let is_there = response == FUNCTION_SUCCEEDED && ASKING.contains(&function);
        if response != FUNCTION_COMPLETE && !is_there {
            world.fail(&format!("task management function {function} is answered {response}"));
        }
        world.coverage.managed.one();
        Ok(())
    }

    /// Waits for the response to a function, and takes all answers that have arrived by then.
    fn response(&self, connection: &Connection) -> Result<u8, Gone> {
        let (world, shared) = (self.world(), &self.shared);
        let until = world.machine.now_ns() + 2 * PATIENCE_NS;
        let is_answered =
            || self.control.iter().all(|control| control.driver.borrow_mut().reap().is_some());
        while !is_answered() {
            connection.check()?;
            if world.machine.now_ns() > until {
                world.fail(&format!("guest {}: task management is not answered", shared.guest));
            }
            world.machine.sleep(20_000);
        }
        self.queues.iter().for_each(|queue| queue.look());
        shared.managing.set(false);
        let mut response = [0];
        shared.view.read_bytes(RESPONSE, &mut response).expect("memory");
        Ok(response[0])
    }
}
