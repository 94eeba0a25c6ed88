//! TLS of one connection.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, InsufficientSizeError,
    UnbufferedStatus, WriteTraffic,
};
use rustls::{CertificateError, CommonState, Error};

use crate::error::SessionError;

/// Most bytes of plaintext of a record (RFC 8446, section 5.1): 2^14.
///
/// Also of one [`Session::encrypt`].
pub const MAX_PLAIN: usize = 1 << 14;

/// Most bytes that [`Session::encrypt`] adds.
///
/// They are a record's overhead and two key updates.
pub const MAX_EXPANSION: usize = 256;

/// Bytes of a record's header.
const HEADER_LEN: usize = 5;

/// The longest record (RFC 5246 section 6.2.3), bytes.
const MAX_RECORD: usize = HEADER_LEN + MAX_PLAIN + 2048;

/// Room for a handshake message of 64 KiB in records, and the bytes received after it.
const INPUT: usize = 96 << 10;

/// Room at first, bytes: a hello. Grows to [`INPUT`].
const FIRST_INPUT: usize = 4 << 10;

/// The result of [`Session::process`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The record is incomplete: more bytes are needed.
    Input,
    /// Plaintext was handed over; there may be more.
    Data,
    /// The peer has closed its side: no plaintext follows.
    Closed,
}

/// The side of a [`Session`] that this process is.
pub trait Side {
    /// What rustls keeps of a connection of that side.
    type Data;
    /// The connection.
    type Connection;

    /// Returns what both sides have in common.
    fn common(connection: &Self::Connection) -> &CommonState;

    /// Passes records to rustls.
    fn process<'c, 'i>(
        connection: &'c mut Self::Connection,
        records: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

/// The side that accepted the connection.
#[derive(Debug)]
pub struct Server;

impl Side for Server {
    type Data = ServerConnectionData;
    type Connection = UnbufferedServerConnection;

    fn common(connection: &Self::Connection) -> &CommonState {
        connection
    }

    fn process<'c, 'i>(
        connection: &'c mut Self::Connection,
        records: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        connection.process_tls_records(records)
    }
}

/// The side that made the connection.
#[derive(Debug)]
pub struct Client;

impl Side for Client {
    type Data = ClientConnectionData;
    type Connection = UnbufferedClientConnection;

    fn common(connection: &Self::Connection) -> &CommonState {
        connection
    }

    fn process<'c, 'i>(
        connection: &'c mut Self::Connection,
        records: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        connection.process_tls_records(records)
    }
}

/// TLS of a connection, from the first byte of its handshake on.
pub struct Session<S: Side = Server> {
    connection: S::Connection,
    /// Received ciphertext, of which `begin..end` is unprocessed.
    input: Vec<u8>,
    begin: usize,
    end: usize,
    /// The part of these bytes that rustls has seen: pieces of handshake messages. rustls gets one record at a
    /// time, so it never buffers plaintext.
    shown: usize,
    closed: bool,
    /// The session has failed and rejects further calls.
    failed: bool,
    /// The name of a denied peer.
    refused: Arc<OnceLock<String>>,
}

impl<S: Side> fmt::Debug for Session<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("handshaking", &self.is_handshaking()).finish()
    }
}

impl<S: Side> Session<S> {
    pub(crate) fn new(connection: S::Connection, refused: Arc<OnceLock<String>>) -> Self {
        let input = vec![0; FIRST_INPUT];
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

    /// Returns whether the handshake is under way.
    ///
    /// No plaintext can be received or sent meanwhile.
    pub fn is_handshaking(&self) -> bool {
        S::common(&self.connection).is_handshaking()
    }

    /// Returns the negotiated protocol version and cipher suite, for messages.
    pub fn description(&self) -> String {
        let common = S::common(&self.connection);
        match (common.protocol_version(), common.negotiated_cipher_suite()) {
            (Some(version), Some(suite)) => format!("{version:?} {:?}", suite.suite()),
            _ => "TLS handshake".into(),
        }
    }

    /// Returns whether a part of a record was received.
    pub fn is_within_record(&self) -> bool {
        self.end - self.begin > self.shown
    }

    /// Returns the buffer for the next bytes of the socket.
    ///
    /// Not empty after [`process`](Self::process) has asked for more.
    pub fn input(&mut self) -> &mut [u8] {
        self.input.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.end - self.begin);
        if self.end == self.input.len() && self.end < INPUT {
            self.input.resize((self.end * 4).min(INPUT), 0);
        }
        &mut self.input[self.end..]
    }

    /// Marks that many bytes of the buffer as received.
    pub fn received(&mut self, bytes: usize) {
        self.end = self.input.len().min(self.end + bytes);
    }

    /// Processes received bytes up to the next plaintext.
    ///
    /// Passes at most [`MAX_PLAIN`] bytes of the plaintext to `plain`.
    ///
    /// Appends bytes to send to `out`, even on failure.
    ///
    /// # Errors
    ///
    /// The session has failed and cannot be used any more.
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
            let UnbufferedStatus { mut discard, state } = S::process(&mut self.connection, shown);
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
                // The caller sends `out` in any case.
                Ok(ConnectionState::TransmitTlsData(transmit)) => transmit.done(),
                Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                    show_more = true;
                }
                Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => self.closed = true,
                // Neither side uses early data.
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
                if self.end - self.begin == INPUT {
                    self.failed = true;
                    return Err(SessionError::TooLong);
                }
                return Ok(Progress::Input);
            }
        }
        Ok(Progress::Closed)
    }

    /// Encrypts bytes into `out`. Returns the number of bytes to send.
    ///
    /// There are at most [`MAX_PLAIN`] bytes, and `out` has room for [`MAX_EXPANSION`] more.
    ///
    /// # Errors
    ///
    /// The session can send no more.
    pub fn encrypt(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, SessionError> {
        self.write(out, |traffic, out| traffic.encrypt(plain, out))
    }

    /// Writes the closing alert into `out`. Returns the number of bytes to send.
    ///
    /// # Errors
    ///
    /// The session can send no more.
    pub fn close(&mut self, out: &mut [u8]) -> Result<usize, SessionError> {
        self.write(out, |traffic, out| traffic.queue_close_notify(out))
    }

    fn write(
        &mut self,
        out: &mut [u8],
        mut write: impl FnMut(&mut WriteTraffic<'_, S::Data>, &mut [u8]) -> Result<usize, EncryptError>,
    ) -> Result<usize, SessionError> {
        if self.failed {
            return Err(over());
        }
        let mut at = 0;
        loop {
            // rustls has seen these bytes before.
            let shown = &mut self.input[self.begin..self.begin + self.shown];
            let UnbufferedStatus { discard, state } = S::process(&mut self.connection, shown);
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

    /// Passes one more complete record to rustls.
    fn show_next_record(&mut self) -> bool {
        let next = &self.input[self.begin + self.shown..self.end];
        let Some(&[kind, _, _, high, low]) = next.first_chunk::<HEADER_LEN>() else { return false };
        let len = HEADER_LEN + usize::from(u16::from_be_bytes([high, low]));
        // Record types of RFC 8446 section 5.1. Others are refused before their data arrives.
        let known = (20..=23).contains(&kind) && len <= MAX_RECORD;
        let len = if known { len } else { HEADER_LEN };
        let whole = next.len() >= len;
        if whole {
            self.shown += len;
        }
        whole
    }

    /// Writes the alert that tells the peer the reason.
    fn last_words(&mut self, out: &mut Vec<u8>) {
        while S::common(&self.connection).wants_write() {
            // Pending output is sent before input is processed.
            match S::process(&mut self.connection, &mut []).state {
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

fn append<Data>(
    mut encoded: EncodeTlsData<'_, Data>,
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

/// The error of a session that has failed before.
fn over() -> SessionError {
    SessionError::Protocol(Error::General("it has failed before".into()))
}

/// The caller guarantees the room.
fn no_room(error: impl fmt::Display) -> SessionError {
    SessionError::Protocol(Error::General(error.to_string()))
}
