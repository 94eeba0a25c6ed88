//! Option haggling: what a client may ask for before it uses an export, and the answers.

use super::{MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader};

/// Bytes of an option's header.
pub const HEADER_LEN: usize = 16;

/// Most bytes of an option's data that are taken: 64 KiB.
///
/// Enough for a name of the greatest length with more queries than there are contexts.
pub const MAX_DATA: u32 = 64 << 10;

/// An option's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Number of the option, `NBD_OPT_*`; see [`code`].
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

/// Option numbers.
pub mod code {
    /// `NBD_OPT_EXPORT_NAME`.
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`.
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`.
    pub const LIST: u32 = 3;
    /// `NBD_OPT_STARTTLS`.
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`.
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`.
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`.
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// The bytes are not an NBD option: nothing that follows can be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadMagic;

impl OptionHeader {
    /// Reads a header.
    ///
    /// # Errors
    ///
    /// It does not begin with `IHAVEOPT`.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, BadMagic> {
        let mut reader = Reader(bytes);
        match (reader.u64(), reader.u32(), reader.u32()) {
            (Some(OPTION_MAGIC), Some(option), Some(len)) => Ok(OptionHeader { option, len }),
            _ => Err(BadMagic),
        }
    }
}

/// An option, understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientOption<'a> {
    /// Use this export; there is no way to refuse but to close the connection.
    ExportName(&'a str),
    /// The client is about to leave.
    Abort,
    /// Name the exports.
    List,
    /// Go on with TLS.
    StartTls,
    /// Tell of an export.
    Info(InfoRequest<'a>),
    /// Use an export.
    Go(InfoRequest<'a>),
    /// Answer in chunks.
    StructuredReply,
    /// Use 64-bit lengths, and answer in chunks.
    ExtendedHeaders,
    /// Name an export's metadata contexts.
    ListMetaContext(Contexts<'a>),
    /// Choose from an export's metadata contexts.
    SetMetaContext(Contexts<'a>),
    /// Something else.
    Unknown,
}

/// What `NBD_OPT_INFO` and `NBD_OPT_GO` ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export.
    pub name: &'a str,
    /// `NBD_INFO_NAME` is wanted.
    pub wants_name: bool,
    /// `NBD_INFO_DESCRIPTION` is wanted.
    pub wants_description: bool,
    /// `NBD_INFO_BLOCK_SIZE` is wanted: the client will keep to it.
    pub wants_block_size: bool,
}

/// What `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT` ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contexts<'a> {
    /// The export.
    pub name: &'a str,
    /// Queries, each a namespace, a colon and a name.
    pub queries: Vec<&'a str>,
}

/// The data of an option that is known make no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalid(
    /// What is wrong, for the client's user.
    pub &'static str,
);

impl<'a> ClientOption<'a> {
    /// Reads an option's data.
    ///
    /// # Errors
    ///
    /// They are not what that option has.
    pub fn parse(option: u32, data: &'a [u8]) -> Result<Self, Invalid> {
        let empty = |option: ClientOption<'a>| match data {
            [] => Ok(option),
            _ => Err(Invalid("this option has no data")),
        };
        match option {
            code::EXPORT_NAME => string(data).map(ClientOption::ExportName),
            code::ABORT => Ok(ClientOption::Abort),
            code::LIST => empty(ClientOption::List),
            code::STARTTLS => empty(ClientOption::StartTls),
            code::INFO => InfoRequest::parse(data).map(ClientOption::Info),
            code::GO => InfoRequest::parse(data).map(ClientOption::Go),
            code::STRUCTURED_REPLY => empty(ClientOption::StructuredReply),
            code::EXTENDED_HEADERS => empty(ClientOption::ExtendedHeaders),
            code::LIST_META_CONTEXT => Contexts::parse(data).map(ClientOption::ListMetaContext),
            code::SET_META_CONTEXT => Contexts::parse(data).map(ClientOption::SetMetaContext),
            _ => Ok(ClientOption::Unknown),
        }
    }
}

fn string(bytes: &[u8]) -> Result<&str, Invalid> {
    if bytes.len() > MAX_STRING {
        return Err(Invalid("a string is longer than 4096 bytes"));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(Invalid("a string is not UTF-8, or contains NUL")),
    }
}

/// A string with its length, 32 bits, in front.
fn counted_string<'a>(reader: &mut Reader<'a>) -> Result<&'a str, Invalid> {
    let len = reader.u32().and_then(|len| usize::try_from(len).ok());
    string(len.and_then(|len| reader.bytes(len)).ok_or(TOO_SHORT)?)
}

const TOO_SHORT: Invalid = Invalid("the option's data end too early");
const TOO_LONG: Invalid = Invalid("the option's data are too long");

impl<'a> InfoRequest<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, Invalid> {
        let mut reader = Reader(data);
        let name = counted_string(&mut reader)?;
        let mut request = InfoRequest {
            name,
            wants_name: false,
            wants_description: false,
            wants_block_size: false,
        };
        for _ in 0..reader.u16().ok_or(TOO_SHORT)? {
            match reader.u16().ok_or(TOO_SHORT)? {
                info::NAME => request.wants_name = true,
                info::DESCRIPTION => request.wants_description = true,
                info::BLOCK_SIZE => request.wants_block_size = true,
                _ => {}
            }
        }
        if reader.0.is_empty() { Ok(request) } else { Err(TOO_LONG) }
    }
}

impl<'a> Contexts<'a> {
    fn parse(data: &'a [u8]) -> Result<Self, Invalid> {
        let mut reader = Reader(data);
        let name = counted_string(&mut reader)?;
        let count = reader.u32().ok_or(TOO_SHORT)?;
        let mut queries = Vec::new();
        // Each query takes up four bytes at least, so the data bound the list, not the count.
        for _ in 0..count {
            queries.push(counted_string(&mut reader)?);
        }
        if reader.0.is_empty() { Ok(Contexts { name, queries }) } else { Err(TOO_LONG) }
    }
}

/// Information types of `NBD_REP_INFO`.
pub mod info {
    /// `NBD_INFO_EXPORT`.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`.
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`.
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`.
    pub const BLOCK_SIZE: u16 = 3;
}

/// An answer to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionReply<'a> {
    /// `NBD_REP_ACK`: done.
    Ack,
    /// `NBD_REP_SERVER`: there is such an export.
    Server {
        /// Its name.
        name: &'a str,
        /// For people; may be empty.
        description: &'a str,
    },
    /// `NBD_REP_INFO` with `NBD_INFO_EXPORT`.
    Export {
        /// Bytes.
        size: u64,
        /// Transmission flags.
        flags: u16,
    },
    /// `NBD_REP_INFO` with `NBD_INFO_NAME`.
    Name(&'a str),
    /// `NBD_REP_INFO` with `NBD_INFO_DESCRIPTION`.
    Description(&'a str),
    /// `NBD_REP_INFO` with `NBD_INFO_BLOCK_SIZE`: bytes.
    BlockSize {
        /// Offsets and lengths are multiples of it.
        minimum: u32,
        /// Multiples of it are fast.
        preferred: u32,
        /// Most bytes of payload.
        maximum: u32,
    },
    /// `NBD_REP_META_CONTEXT`.
    MetaContext {
        /// The number it has from now on.
        id: u32,
        /// Its name.
        name: &'a str,
    },
    /// One of the errors, with a message for people.
    Error(OptionError, &'a str),
}

/// Why an option is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum OptionError {
    /// `NBD_REP_ERR_UNSUP`: not known here.
    Unsupported = 0x8000_0001,
    /// `NBD_REP_ERR_POLICY`: not allowed here.
    Policy = 0x8000_0002,
    /// `NBD_REP_ERR_INVALID`: makes no sense.
    Invalid = 0x8000_0003,
    /// `NBD_REP_ERR_TLS_REQD`: not before TLS.
    TlsRequired = 0x8000_0005,
    /// `NBD_REP_ERR_UNKNOWN`: there is no such export.
    Unknown = 0x8000_0006,
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: extended headers take precedence.
    ExtendedHeaders = 0x8000_000a,
}

pub(crate) const REP_ACK: u32 = 1;
const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;

impl OptionReply<'_> {
    /// Appends the reply to `option` to `out`.
    pub fn encode(&self, option: u32, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        out.extend(option.to_be_bytes());
        let kind = match self {
            OptionReply::Ack => REP_ACK,
            OptionReply::Server { .. } => REP_SERVER,
            OptionReply::MetaContext { .. } => REP_META_CONTEXT,
            OptionReply::Error(error, _) => *error as u32,
            _ => REP_INFO,
        };
        out.extend(kind.to_be_bytes());
        out.extend([0; 4]);
        let data = out.len();
        match *self {
            OptionReply::Ack => {}
            OptionReply::Server { name, description } => {
                out.extend((name.len() as u32).to_be_bytes());
                out.extend(name.as_bytes());
                out.extend(description.as_bytes());
            }
            OptionReply::Export { size, flags } => {
                out.extend(info::EXPORT.to_be_bytes());
                out.extend(size.to_be_bytes());
                out.extend(flags.to_be_bytes());
            }
            OptionReply::Name(text) => {
                out.extend(info::NAME.to_be_bytes());
                out.extend(text.as_bytes());
            }
            OptionReply::Description(text) => {
                out.extend(info::DESCRIPTION.to_be_bytes());
                out.extend(text.as_bytes());
            }
            OptionReply::BlockSize { minimum, preferred, maximum } => {
                out.extend(info::BLOCK_SIZE.to_be_bytes());
                out.extend(minimum.to_be_bytes());
                out.extend(preferred.to_be_bytes());
                out.extend(maximum.to_be_bytes());
            }
            OptionReply::MetaContext { id, name } => {
                out.extend(id.to_be_bytes());
                out.extend(name.as_bytes());
            }
            OptionReply::Error(_, message) => out.extend(message.as_bytes()),
        }
        let len = (out.len() - data) as u32;
        out[begin + 16..data].copy_from_slice(&len.to_be_bytes());
    }
}
