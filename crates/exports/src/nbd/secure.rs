//! TLS between a connection's socket and its state: what came is decrypted to where the state wants it,
//! what was gathered is encrypted piece by piece.
//!
//! The data are copied to and from memory that TLS can work in, and rustls allocates for each record.
//! Both are small beside the cipher.

use event_loop::{AlignedBuf, IoBufs};
use tls::{MAX_EXPANSION, MAX_PLAIN, Progress, Session};

use super::handshake::Secured;
use super::state::State;

/// Ciphertext of one receive, bytes.
const RECEIVE: usize = 64 << 10;
/// Records of one send.
const RECORDS: usize = 16;
/// The protocol's own messages that wait to be sent, bytes. A client that makes for more without
/// reading any is sent away.
const MAX_WORDS: usize = 4096;

pub(super) struct Secure {
    session: Session,
    /// What comes from the socket, and what goes to it.
    received: IoBufs,
    encrypted: IoBufs,
    /// Where the state wants what was decrypted.
    place: IoBufs,
    /// What is to be encrypted: from `at` on it was not yet.
    plain: IoBufs,
    at: usize,
    /// Plaintext and ciphertext of one record.
    chunk: Box<[u8]>,
    record: Box<[u8]>,
    /// The protocol's own messages, already encrypted.
    words: Vec<u8>,
    closed: bool,
    /// All that can still be sent is why.
    failed: bool,
}

impl Secure {
    /// Goes on with TLS; the state gets what came with the handshake. `None`: there is no memory.
    pub(super) fn new(secured: Secured, state: &mut State) -> Option<Self> {
        let Secured { session, plain } = secured;
        let mut place = IoBufs::with_capacity(2);
        if !plain.is_empty() {
            give(state, &mut place, &plain);
        }
        Some(Secure {
            session,
            received: AlignedBuf::io_bufs(RECEIVE, 64)?,
            encrypted: AlignedBuf::io_bufs(RECORDS * (MAX_PLAIN + MAX_EXPANSION) + MAX_WORDS, 64)?,
            place,
            plain: IoBufs::new(),
            at: 0,
            chunk: vec![0; MAX_PLAIN].into(),
            record: vec![0; MAX_PLAIN + MAX_EXPANSION].into(),
            words: Vec::new(),
            closed: false,
            failed: false,
        })
    }

    // ---- in ------------------------------------------------------------------------------------

    /// The memory for what comes from the socket next.
    pub(super) fn input_memory(&mut self, bufs: &mut IoBufs) {
        let room = self.session.input().len();
        bufs.clear();
        bufs.append_part(&self.received, 0, room.min(RECEIVE));
    }

    /// That many bytes have come there.
    pub(super) fn received(&mut self, bytes: usize) {
        let input = self.session.input();
        let room = input.len().min(bytes);
        let copied = self.received.copy_out(0, &mut input[..room]);
        self.session.received(copied);
    }

    /// Whether a record has begun to come.
    pub(super) fn is_within_record(&self) -> bool {
        self.session.is_within_record()
    }

    /// Decrypts the next of what came and gives it to the state, which has looked at all before it.
    ///
    /// # Errors
    ///
    /// Why TLS cannot go on.
    pub(super) fn decrypt(&mut self, state: &mut State) -> Result<Progress, &'static str> {
        let Secure { session, words, place, .. } = self;
        let progress = session.process(words, &mut |plain| give(state, place, plain));
        self.failed |= progress.is_err();
        match progress {
            Ok(_) if self.words.len() > MAX_WORDS => {
                Err("the client does not read what it asks for")
            }
            progress => progress.map_err(|error| error.reason()),
        }
    }

    // ---- out -----------------------------------------------------------------------------------

    /// Whether the protocol itself has something to say.
    pub(super) fn has_words(&self) -> bool {
        !self.words.is_empty()
    }

    /// What is to be sent next goes there, once all before it was [encrypted](Self::encrypt).
    pub(super) fn plain(&mut self) -> &mut IoBufs {
        self.at = 0;
        &mut self.plain
    }

    /// Says that there will be no more.
    pub(super) fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true)
            && let Ok(len) = self.session.close(&mut self.record)
        {
            self.words.extend(&self.record[..len]);
        }
    }

    /// Encrypts as much as goes out at once, into `bufs`. `false`: there is nothing.
    ///
    /// # Errors
    ///
    /// Why TLS cannot go on.
    pub(super) fn encrypt(&mut self, bufs: &mut IoBufs) -> Result<bool, &'static str> {
        let mut end = self.encrypted.copy_in(0, &self.words);
        self.words.drain(..end);
        for _ in 0..RECORDS {
            if self.failed {
                break;
            }
            let len = self.plain.copy_out(self.at, &mut self.chunk);
            if len == 0 {
                break;
            }
            self.at += len;
            let encrypted = self.session.encrypt(&self.chunk[..len], &mut self.record);
            let len = encrypted.map_err(|error| error.reason())?;
            end += self.encrypted.copy_in(end, &self.record[..len]);
        }
        bufs.clear();
        bufs.append_part(&self.encrypted, 0, end);
        Ok(end > 0)
    }
}

/// Puts what came where the state wants it. A record always finds room, since less than a header is
/// left of what came before it.
fn give(state: &mut State, place: &mut IoBufs, plain: &[u8]) {
    state.input_memory(place);
    let given = place.copy_in(0, plain);
    debug_assert_eq!(given, plain.len(), "the state has room for a record");
    state.received(given);
}
