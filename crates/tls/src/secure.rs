//! TLS between a socket and a protocol: received bytes are decrypted into the protocol's memory, and its
//! messages are encrypted record by record.
//!
//! Data is copied to and from the memory of the session, and rustls allocates per record. Both cost little beside
//! the cipher.

use event_loop::{AlignedBuf, IoBufs};

use crate::session::{MAX_EXPANSION, MAX_PLAIN, Progress, Session, Side};

/// Ciphertext of one receive, bytes.
const RECEIVE: usize = 64 << 10;
/// Records of one send.
const RECORDS: usize = 16;
/// TLS's own messages that wait to be sent, bytes. A peer that causes more without reading any violates the
/// protocol.
const MAX_WORDS: usize = 4096;

/// The protocol that gets decrypted bytes.
pub trait Sink {
    /// Sets `place` to the memory for the next bytes.
    ///
    /// The memory has at least one byte, or none if no bytes are wanted.
    fn input_memory(&mut self, place: &mut IoBufs);

    /// Reports that `bytes` bytes are in that memory.
    fn received(&mut self, bytes: usize, place: &mut IoBufs);
}

/// A session between the memory of socket operations and a [`Sink`].
pub struct Secure<S: Side> {
    session: Session<S>,
    /// Ciphertext from the socket, and to the socket.
    received: IoBufs,
    encrypted: IoBufs,
    /// The sink's memory for the next bytes.
    place: IoBufs,
    /// Plaintext to send, encrypted up to `at`.
    plain: IoBufs,
    at: usize,
    /// Plaintext and ciphertext of one record.
    chunk: Box<[u8]>,
    record: Box<[u8]>,
    /// TLS's own messages, encrypted.
    words: Vec<u8>,
    closed: bool,
    /// Only the alert that tells the reason can still be sent.
    failed: bool,
}

impl<S: Side> Secure<S> {
    /// Returns the session with its buffers after the handshake.
    ///
    /// Passes `plain`, which arrived with the end of the handshake, to `sink`. `None`: out of memory.
    pub fn new(session: Session<S>, plain: &[u8], sink: &mut impl Sink) -> Option<Self> {
        let mut place = IoBufs::with_capacity(2);
        give(sink, &mut place, plain);
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

    /// Puts the memory for the next bytes of the socket into `bufs`.
    pub fn input_memory(&mut self, bufs: &mut IoBufs) {
        let room = self.session.input().len();
        bufs.clear();
        bufs.append_part(&self.received, 0, room.min(RECEIVE));
    }

    /// Reports that `bytes` bytes are in that memory.
    pub fn received(&mut self, bytes: usize) {
        let input = self.session.input();
        let room = input.len().min(bytes);
        let copied = self.received.copy_out(0, &mut input[..room]);
        self.session.received(copied);
    }

    /// Returns whether a part of a record was received.
    pub fn is_within_record(&self) -> bool {
        self.session.is_within_record()
    }

    /// Decrypts the next record and passes it to `sink`.
    ///
    /// `sink` has processed all bytes before.
    ///
    /// # Errors
    ///
    /// Why the session has failed.
    pub fn decrypt(&mut self, sink: &mut impl Sink) -> Result<Progress, &'static str> {
        let Secure { session, words, place, .. } = self;
        let progress = session.process(words, &mut |plain| give(sink, place, plain));
        self.failed |= progress.is_err();
        match progress {
            Ok(_) if self.words.len() > MAX_WORDS => Err("the peer does not read what it asks for"),
            progress => progress.map_err(|error| error.reason()),
        }
    }

    // ---- out -----------------------------------------------------------------------------------

    /// Returns whether TLS has protocol messages to send.
    pub fn has_words(&self) -> bool {
        !self.words.is_empty()
    }

    /// Returns the list for the next plaintext.
    ///
    /// All before must have been [encrypted](Self::encrypt).
    pub fn plain(&mut self) -> &mut IoBufs {
        self.at = 0;
        &mut self.plain
    }

    /// Sends the closing alert after all plaintext.
    pub fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true)
            && let Ok(len) = self.session.close(&mut self.record)
        {
            self.words.extend(&self.record[..len]);
        }
    }

    /// Encrypts a last short message and the closing alert into `out`.
    ///
    /// Returns the bytes to send. `None`: the session can send no more.
    pub fn last(&mut self, message: &[u8], out: &mut [u8]) -> Option<usize> {
        let len = self.session.encrypt(message, out).ok()?;
        let rest = self.session.close(out.get_mut(len..)?).ok()?;
        Some(len + rest)
    }

    /// Encrypts up to 16 records of plaintext into `bufs`.
    ///
    /// `false`: nothing is left to send.
    ///
    /// # Errors
    ///
    /// Why the session has failed.
    pub fn encrypt(&mut self, bufs: &mut IoBufs) -> Result<bool, &'static str> {
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

/// Copies a record into the sink's memory. A record always finds room, since the sink has less than a header left.
fn give(sink: &mut impl Sink, place: &mut IoBufs, mut plain: &[u8]) {
    while !plain.is_empty() {
        sink.input_memory(place);
        let given = place.copy_in(0, plain);
        sink.received(given, place);
        debug_assert!(given > 0, "the sink has room for a record");
        if given == 0 {
            return;
        }
        plain = plain.get(given..).unwrap_or_default();
    }
}
