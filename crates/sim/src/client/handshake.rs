//! Option negotiation, in another order each time.

use exports::nbd::wire::client::{
    Handshake, MAGIC_LEN, OPTION_REPLY_LEN, OptionAnswer, OptionReplyHeader, encode_option,
    encode_set_meta_context,
};
use exports::nbd::wire::option::{OptionError, OptionReply, code, info};
use exports::nbd::wire::reply::ReplyMode;
use exports::nbd::wire::{flag, handshake_flag};

use super::connection::{Connection, Gone};
use super::export_name;
use crate::model::SECTOR;
use crate::user::PATIENCE_NS;

/// An option number that does not exist.
const UNKNOWN_OPTION: u32 = 77;

/// Flags of every export in the simulation.
const FLAGS: u16 =
    flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM | flag::CAN_MULTI_CONN;

impl Connection {
    /// Negotiates from the greeting to the transmission phase. Returns `false` if the client leaves before.
    pub(super) fn shake_hands(&self) -> Result<bool, Gone> {
        let random = self.world().random();
        let magic: [u8; MAGIC_LEN] = self.take()?;
        let flags = u16::from_be_bytes(self.take()?);
        let offered = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        if (Handshake::parse(&magic), flags) != (Ok(Handshake::Newstyle), offered) {
            self.fail("that is no greeting");
        }
        let no_zeroes = random.one_in(2);
        let flags = if no_zeroes { offered } else { handshake_flag::FIXED_NEWSTYLE };
        self.put(&u32::from(flags).to_be_bytes())?;
        let export = export_name(self.shared.disk);
        self.ask_around(&export)?;
        let mode = random.pick(&[ReplyMode::Simple, ReplyMode::Structured, ReplyMode::Extended]);
        match mode {
            ReplyMode::Simple => {}
            ReplyMode::Structured => self.agree(code::STRUCTURED_REPLY, &[])?,
            ReplyMode::Extended => self.agree(code::EXTENDED_HEADERS, &[])?,
        }
        if random.one_in(16) {
            return self.break_off();
        }
        self.allocation.set(mode != ReplyMode::Simple && random.one_in(2));
        if self.allocation.get() {
            let mut option = Vec::new();
            encode_set_meta_context(&export, "base:allocation", &mut option);
            self.put(&option)?;
            if self.answers(code::SET_META_CONTEXT)? != Ok(1) {
                self.fail("base:allocation is refused");
            }
        }
        let size = match mode != ReplyMode::Extended && random.one_in(4) {
            true => self.choose_by_name(&export, no_zeroes)?,
            false => self.go(&export)?,
        };
        let sectors = (size / SECTOR as u64) as u32;
        // A resize may be done before the client learns of it.
        let most = self.shared.model.borrow().sectors() + 8;
        if size % SECTOR as u64 != 0 || sectors < self.shared.plan.sectors || sectors > most {
            self.fail(&format!("the export has {size} bytes, it is said"));
        }
        self.sectors.set(sectors);
        self.mode.set(Some(mode));
        let coverage = &self.world().coverage;
        match mode {
            ReplyMode::Simple => coverage.nbd_simple.one(),
            ReplyMode::Structured => coverage.nbd_structured.one(),
            ReplyMode::Extended => coverage.nbd_extended.one(),
        }
        Ok(true)
    }

    /// Sends options without effect, then waits until the export exists.
    fn ask_around(&self, export: &str) -> Result<(), Gone> {
        let random = self.world().random();
        if random.one_in(4) {
            self.refuses(UNKNOWN_OPTION, &[1, 2, 3], OptionError::Unsupported)?;
        }
        if random.one_in(4) {
            self.refuses(code::STARTTLS, &[], OptionError::Policy)?;
        }
        if random.one_in(4) {
            self.refuses(code::GO, &named("another"), OptionError::Unknown)?;
        }
        if random.one_in(4) {
            self.option(code::LIST, &[])?;
            let listed = self.answers(code::LIST)?;
            if listed.is_err() {
                self.fail("exports are not listed");
            }
        }
        // A starting daemon lets clients in once it has all exports.
        self.option(code::INFO, &named(export))?;
        if let Err(error) = self.answers(code::INFO)? {
            self.fail(&format!("INFO is refused: {error:#x}"));
        }
        Ok(())
    }

    /// Leaves during the negotiation.
    fn break_off(&self) -> Result<bool, Gone> {
        let random = self.world().random();
        self.world().coverage.nbd_broken_off.one();
        let mut option = Vec::new();
        match random.one_in(2) {
            true => encode_option(code::ABORT, &[], &mut option),
            false => {
                encode_option(code::GO, &named("disk"), &mut option);
                option.truncate(random.between(1, option.len() as u64 - 1) as usize);
            }
        }
        self.put(&option)?;
        Ok(false)
    }

    /// Sends `NBD_OPT_EXPORT_NAME` and returns the size in bytes.
    fn choose_by_name(&self, export: &str, no_zeroes: bool) -> Result<u64, Gone> {
        self.option(code::EXPORT_NAME, export.as_bytes())?;
        let size = u64::from_be_bytes(self.take()?);
        self.check_flags(u16::from_be_bytes(self.take()?));
        if !no_zeroes && self.take()? != [0; 124] {
            self.fail("124 bytes are to be zeroes");
        }
        Ok(size)
    }

    /// Sends `NBD_OPT_GO` and returns the size in bytes.
    fn go(&self, export: &str) -> Result<u64, Gone> {
        let mut data = named(export);
        if self.world().random().one_in(2) {
            let end = data.len();
            data[end - 1] = 1;
            data.extend(info::BLOCK_SIZE.to_be_bytes());
        }
        self.option(code::GO, &data)?;
        let mut known = None;
        loop {
            let (kind, data) = self.answer(code::GO)?;
            match OptionAnswer::parse(kind, &data) {
                Ok(OptionAnswer::Reply(OptionReply::Export { size, flags })) => {
                    self.check_flags(flags);
                    known = Some(size);
                }
                Ok(OptionAnswer::Reply(OptionReply::Ack)) => break,
                Ok(OptionAnswer::Reply(_)) => {}
                other => self.fail(&format!("GO is answered {other:?}")),
            }
        }
        match known {
            Some(size) => Ok(size),
            None => self.fail("GO does not tell the size"),
        }
    }

    fn check_flags(&self, flags: u16) {
        if flags & FLAGS != FLAGS || flags & flag::READ_ONLY != 0 {
            self.fail(&format!("the export has the flags {flags:#x}"));
        }
    }

    // ---- options -------------------------------------------------------------------------------

    fn option(&self, option: u32, data: &[u8]) -> Result<(), Gone> {
        let mut bytes = Vec::new();
        encode_option(option, data, &mut bytes);
        self.put(&bytes)
    }

    /// Sends an option that the server has to refuse with `error`.
    fn refuses(&self, option: u32, data: &[u8], error: OptionError) -> Result<(), Gone> {
        self.world().coverage.nbd_refused.one();
        self.option(option, data)?;
        match self.answers(option)? {
            Err(refused) if refused == error as u32 => Ok(()),
            other => self.fail(&format!("option {option} is answered {other:?}")),
        }
    }

    /// Sends an option that the server has to accept.
    fn agree(&self, option: u32, data: &[u8]) -> Result<(), Gone> {
        self.option(option, data)?;
        match self.answers(option)? {
            Ok(0) => Ok(()),
            other => self.fail(&format!("option {option} is answered {other:?}")),
        }
    }

    /// Reads all answers to an option: returns how many came before the acknowledgement, or the error.
    fn answers(&self, option: u32) -> Result<Result<u32, u32>, Gone> {
        let mut count = 0;
        loop {
            let (kind, data) = self.answer(option)?;
            match OptionAnswer::parse(kind, &data) {
                Ok(OptionAnswer::Reply(OptionReply::Ack)) => return Ok(Ok(count)),
                Ok(OptionAnswer::Refused { code, .. }) => return Ok(Err(code)),
                Ok(_) => count += 1,
                Err(nonsense) => self.fail(nonsense.0),
            }
        }
    }

    fn answer(&self, option: u32) -> Result<(u32, Vec<u8>), Gone> {
        let bytes: [u8; OPTION_REPLY_LEN] = self.take()?;
        let header = match OptionReplyHeader::parse(&bytes) {
            Ok(header) if header.option == option => header,
            other => self.fail(&format!("option {option} is answered {other:?}")),
        };
        self.wait_for(header.len as usize)?;
        let data = self.input.borrow_mut().drain(..header.len as usize).collect();
        Ok((header.kind, data))
    }

    // ---- bytes ---------------------------------------------------------------------------------

    fn put(&self, bytes: &[u8]) -> Result<(), Gone> {
        self.output.borrow_mut().extend(bytes);
        self.send()
    }

    fn take<const N: usize>(&self) -> Result<[u8; N], Gone> {
        self.wait_for(N)?;
        let mut bytes = [0; N];
        self.input.borrow_mut().drain(..N).zip(&mut bytes).for_each(|(byte, place)| *place = byte);
        Ok(bytes)
    }

    /// Waits until `bytes` bytes have been received.
    fn wait_for(&self, bytes: usize) -> Result<(), Gone> {
        let machine = &self.world().machine;
        let until = machine.now_ns() + PATIENCE_NS;
        loop {
            let received = self.receive();
            if self.input.borrow().len() >= bytes {
                return Ok(());
            }
            received?;
            self.send()?;
            if machine.now_ns() >= until {
                self.fail(&format!("no answer to an option in {PATIENCE_NS} ns"));
            }
            self.sleep_until(until);
        }
    }
}

/// The data of an option that names an export, and asks for no information.
fn named(export: &str) -> Vec<u8> {
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend(export.as_bytes());
    data.extend([0; 2]);
    data
}
