//! One connection's TLS.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, InsufficientSizeError,
    UnbufferedStatus,
};
use rustls::{CertificateError, Error};

use crate::error::SessionError;

/// Most plaintext of a record, bytes (RFC 8446 section 5.1): what one [`Session::encrypt`] takes.
pub const MAX_PLAIN: usize = 1 << 14;

/// Most that [`Session::encrypt`] adds, bytes: what goes with a record, and two changes of keys.
pub const MAX_EXPANSION: usize = 256;

/// Bytes of a record's header.
const HEADER_LEN: usize = 5;

/// Longest record that there is (RFC 5246 section 6.2.3), bytes.
const MAX_RECORD: usize = HEADER_LEN + MAX_PLAIN + 2048;

/// Room for a handshake message of 64 KiB, in records, and what came behind it.
const INPUT: usize = 96 << 10;

/// What came of looking at the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More of it has to come.
    Input,
    /// Plaintext was handed over; there may be more.
    Data,
    /// There will be no more plaintext: the client said so.
    Closed,
}

/// TLS of a connection, from the first byte of its handshake on.
pub struct Session {
    connection: UnbufferedServerConnection,
    /// Ciphertext that came; of it `begin..end` is still needed.
    input: Box<[u8]>,
    begin: usize,
    end: usize,
    /// Of that, how many bytes the connection was shown already: parts of handshake messages. It gets
    /// one record at a time, so that it never holds plaintext that nobody has asked for.
    shown: usize,
    closed: bool,
    /// It has failed: nothing can be asked of the connection any more.
    failed: bool,
    /// The name of a client that is not let in.
    refused: Arc<OnceLock<String>>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("handshaking", &self.is_handshaking()).finish()
    }
}

impl Session {
    pub(crate) fn new(
        connection: UnbufferedServerConnection,
        refused: Arc<OnceLock<String>>,
    ) -> Self {
        let input = vec![0; INPUT].into_boxed_slice();
        Session {
            connection,
            input,
            begin: 0,
            end: 0,
            shown: 0,
            closed: false,
            failed: false,
            refused,
        }
    }

    /// Whether it is not known yet who the client is. No plaintext comes, and none can be sent.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// The version of the protocol and the cipher that were agreed on, for messages.
    pub fn description(&self) -> String {
        let chosen =
            (self.connection.protocol_version(), self.connection.negotiated_cipher_suite());
        match chosen {
            (Some(version), Some(suite)) => format!("{version:?} {:?}", suite.suite()),
            _ => "TLS handshake".into(),
        }
    }

    /// Whether a record has begun to come.
    pub fn is_within_record(&self) -> bool {
        self.end - self.begin > self.shown
    }

    /// Where bytes of the socket go next. Never empty once [`process`](Self::process) has asked for
    /// them.
    pub fn input(&mut self) -> &mut [u8] {
        self.input.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        &mut self.input[self.end..]
    }

    /// That many bytes have come there.
    pub fn received(&mut self, bytes: usize) {
        self.end = self.input.len().min(self.end + bytes);
    }

    /// Looks at what came, up to the next plaintext, which `plain` is given: at most [`MAX_PLAIN`]
    /// bytes. Appends to `out` what is to be sent, also when this fails.
    ///
    /// # Errors
    ///
    /// The session is over; nothing else can be done with it.
    pub fn process(
        &mut self,
        out: &mut Vec<u8>,
        plain: &mut dyn FnMut(&[u8]),
    ) -> Result<Progress, SessionError> {
        while !self.closed {
            if self.failed {
                return Err(over());
            }
            let shown = &mut self.input[self.begin..self.begin + self.shown];
            let UnbufferedStatus { mut discard, state } =
                self.connection.process_tls_records(shown);
            let mut data = false;
            let mut show_more = false;
            let mut failed = None;
            match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record?;
                        discard += record.discard;
                        if !record.payload.is_empty() {
                            data = true;
                            plain(record.payload);
                        }
                    }
                }
                Ok(ConnectionState::EncodeTlsData(encoded)) => append(encoded, out)?,
                // It will be.
                Ok(ConnectionState::TransmitTlsData(transmit)) => transmit.done(),
                Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                    show_more = true;
                }
                Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => self.closed = true,
                // Early data are not offered.
                Ok(_) => failed = Some(Error::General("early data".into())),
                Err(error) => failed = Some(error),
            }
            self.discard(discard);
            if let Some(error) = failed {
                self.failed = true;
                self.last_words(out);
                return Err(self.why(error));
            }
            if data {
                return Ok(Progress::Data);
            }
            if show_more && !self.show_next_record() {
                if self.end - self.begin == self.input.len() {
                    self.failed = true;
                    return Err(SessionError::TooLong);
                }
                return Ok(Progress::Input);
            }
        }
        Ok(Progress::Closed)
    }

    /// Encrypts at most [`MAX_PLAIN`] bytes to the beginning of `out`, which has room for
    /// [`MAX_EXPANSION`] more. Gives how many bytes of `out` are to be sent.
    ///
    /// # Errors
    ///
    /// Nothing more can be sent.
    pub fn encrypt(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, SessionError> {
        self.write(out, |traffic, out| traffic.encrypt(plain, out))
    }

    /// Says, at the beginning of `out`, that nothing more comes. Gives how many bytes of it are to be
    /// sent.
    ///
    /// # Errors
    ///
    /// Nothing more can be sent.
    pub fn close(&mut self, out: &mut [u8]) -> Result<usize, SessionError> {
        self.write(out, |traffic, out| traffic.queue_close_notify(out))
    }

    fn write(
        &mut self,
        out: &mut [u8],
        mut write: impl FnMut(&mut Traffic<'_>, &mut [u8]) -> Result<usize, EncryptError>,
    ) -> Result<usize, SessionError> {
        if self.failed {
            return Err(over());
        }
        let mut at = 0;
        loop {
            // It was shown these before, so nothing new comes of them.
            let shown = &mut self.input[self.begin..self.begin + self.shown];
            let UnbufferedStatus { discard, state } = self.connection.process_tls_records(shown);
            let mut written = None;
            match state {
                Ok(ConnectionState::EncodeTlsData(mut encoded)) => {
                    at += encoded.encode(&mut out[at..]).map_err(no_room)?;
                }
                Ok(ConnectionState::TransmitTlsData(transmit)) => transmit.done(),
                Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                    written = Some(write(&mut traffic, &mut out[at..]));
                }
                Ok(ConnectionState::PeerClosed) => {}
                Ok(state) => return Err(Error::General(format!("cannot send: {state:?}")).into()),
                Err(error) => return Err(error.into()),
            }
            self.discard(discard);
            match written {
                None => {}
                Some(Ok(bytes)) => return Ok(at + bytes),
                Some(Err(EncryptError::EncryptExhausted)) => {
                    return Err(SessionError::KeysExhausted);
                }
                Some(Err(error)) => return Err(no_room(error)),
            }
        }
    }

    fn discard(&mut self, bytes: usize) {
        let bytes = bytes.min(self.shown);
        self.begin += bytes;
        self.shown -= bytes;
    }

    /// Shows the connection one more record, if all of it is there.
    fn show_next_record(&mut self) -> bool {
        let next = &self.input[self.begin + self.shown..self.end];
        let Some(&[kind, _, _, high, low]) = next.first_chunk::<HEADER_LEN>() else { return false };
        let len = HEADER_LEN + usize::from(u16::from_be_bytes([high, low]));
        // Those (RFC 8446 section 5.1) are known, others are refused without their data.
        let known = (20..=23).contains(&kind) && len <= MAX_RECORD;
        let len = if known { len } else { HEADER_LEN };
        let whole = next.len() >= len;
        if whole {
            self.shown += len;
        }
        whole
    }

    /// The alert that tells the client why.
    fn last_words(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            // What waits to be sent comes before any input is looked at.
            match self.connection.process_tls_records(&mut []).state {
                Ok(ConnectionState::EncodeTlsData(encoded)) => {
                    if append(encoded, out).is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    fn why(&self, error: Error) -> SessionError {
        let refused = CertificateError::ApplicationVerificationFailure;
        match (&error, self.refused.get()) {
            (Error::InvalidCertificate(why), Some(name)) if *why == refused => {
                SessionError::NotAuthorized { name: name.clone() }
            }
            _ => error.into(),
        }
    }
}

type ServerData = rustls::server::ServerConnectionData;
type Traffic<'a> = rustls::unbuffered::WriteTraffic<'a, ServerData>;

fn append(
    mut encoded: EncodeTlsData<'_, ServerData>,
    out: &mut Vec<u8>,
) -> Result<(), SessionError> {
    let at = out.len();
    let Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) =
        encoded.encode(&mut [])
    else {
        return Ok(());
    };
    out.resize(at + required_size, 0);
    encoded.encode(&mut out[at..]).map(drop).map_err(no_room)
}

/// What a session says that has failed before.
fn over() -> SessionError {
    SessionError::Protocol(Error::General("it has failed before".into()))
}

/// It is promised that there is room.
fn no_room(error: impl fmt::Display) -> SessionError {
    SessionError::Protocol(Error::General(error.to_string()))
}
