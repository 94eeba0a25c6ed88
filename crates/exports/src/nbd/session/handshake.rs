//! The handshake, from the greeting to the choice of an export: fixed newstyle.

use std::sync::Arc;

use super::transmission::{Agreed, Context, Contexts};
use crate::nbd::wire::option::{
    ClientOption, Contexts as Queries, InfoRequest, Invalid, OptionError, OptionReply, code,
};
use crate::nbd::wire::reply::ReplyMode;
use crate::nbd::wire::{INIT_MAGIC, MAX_PAYLOAD, OPTION_MAGIC, flag, handshake_flag};

/// Metadata contexts: the parts of their names.
const BASE: &str = "base:";
const ALLOCATION: &str = "allocation";
const QEMU: &str = "qemu:";
const DEPTH: &str = "allocation-depth";
const BITMAP: &str = "dirty-bitmap:";

/// QSD's error for an option that is sent twice.
const EXTENDED_ALREADY: &str = "extended headers already negotiated";
/// Bytes of an export's name in errors, as in QSD.
const SHOWN_NAME: usize = 80;

/// An export as the handshake describes it to clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its name: at most 4096 bytes, without NUL.
    pub name: String,
    /// For people; at most 4096 bytes, without NUL. Empty: there is none.
    pub description: String,
    /// Bytes of the export.
    pub size: u64,
    /// No write passes.
    pub read_only: bool,
    /// Whether clients may use several connections at a time.
    pub multi_conn: bool,
    /// Smallest block in bytes: a power of two, at most 65536, that `size` is a multiple of.
    /// Requests are fastest in multiples of this, bytes: a power of two, from 4096 to [`MAX_PAYLOAD`].
    pub preferred_block: u32,
    /// There is a context `qemu:allocation-depth`.
    pub allocation_depth: bool,
    /// The names of bitmaps that there are contexts of, at most
    /// [`MAX_BITMAPS`](super::transmission::MAX_BITMAPS).
    pub bitmaps: Vec<String>,
}

impl ExportInfo {
    fn bitmaps(&self, is_wanted: impl Fn(&str) -> bool) -> u64 {
        let names = self.bitmaps.iter().zip(0..);
        names.filter(|(name, _)| is_wanted(name)).fold(0, |bits, (_, index)| bits | 1 << index)
    }

    /// The contexts that a query asks for. `lists`: a namespace alone stands for all in it.
    fn contexts_of(&self, query: &str, lists: bool) -> Contexts {
        let none = Contexts::default();
        if let Some(name) = query.strip_prefix(BASE) {
            return Contexts { allocation: name == ALLOCATION || lists && name.is_empty(), ..none };
        }
        let Some(name) = query.strip_prefix(QEMU) else { return none };
        let all = lists && name.is_empty();
        let bitmaps = match name.strip_prefix(BITMAP) {
            Some("") => self.bitmaps(|_| lists),
            Some(wanted) => self.bitmaps(|name| name == wanted),
            None => self.bitmaps(|_| all),
        };
        let depth = self.allocation_depth && (all || name == DEPTH);
        Contexts { depth, bitmaps, ..none }
    }

    /// All contexts that queries ask for. `lists`: and all if there are no queries.
    fn contexts(&self, queries: &[&str], lists: bool) -> Contexts {
        let mut contexts = Contexts::default();
        let all = [BASE, QEMU];
        let queries = if lists && queries.is_empty() { &all } else { queries };
        for query in queries {
            let Contexts { allocation, depth, bitmaps } = self.contexts_of(query, lists);
            contexts.allocation |= allocation;
            contexts.depth |= depth;
            contexts.bitmaps |= bitmaps;
        }
        contexts
    }

    fn context_name(&self, context: Context) -> String {
        match context {
            Context::Allocation => format!("{BASE}{ALLOCATION}"),
            Context::Depth => format!("{QEMU}{DEPTH}"),
            Context::Bitmap(index) => {
                let name = self.bitmaps.get(index as usize).map_or("", String::as_str);
                format!("{QEMU}{BITMAP}{name}")
            }
        }
    }

    /// The transmission flags for a client with those replies.
    fn flags(&self, mode: ReplyMode) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        flags |= match self.read_only {
            true => flag::READ_ONLY,
            false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
        };
        if self.multi_conn {
            flags |= flag::CAN_MULTI_CONN;
        }
        if mode != ReplyMode::Simple {
            flags |= flag::SEND_DF;
        }
        flags
    }
}

/// Why a handshake ends without an export, other than by the client's leave.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Flags that were not offered.
    #[error("client flags {0:#x} were not offered")]
    Flags(u32),
    /// An option that does not begin with its magic number.
    #[error("it does not speak the NBD protocol")]
    BadMagic,
    /// An option with more data than any has.
    #[error("option {option} has {len} bytes of data, which is too long")]
    TooLong {
        /// The option.
        option: u32,
        /// Bytes.
        len: u32,
    },
    /// `NBD_OPT_EXPORT_NAME` cannot be refused in words.
    #[error("{0}")]
    Refused(String),
    /// A client that does not know fixed newstyle sent this option.
    #[error("option {0} without fixed newstyle negotiation")]
    NotFixed(u32),
}

/// The state of TLS in a handshake.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tls {
    /// The server does not offer TLS.
    #[default]
    Off,
    /// The server requires TLS, and the client has not begun it: no export is offered yet.
    Required,
    /// The handshake runs within TLS.
    On,
}

/// The next step after an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The next option.
    Option,
    /// TLS, and then, in it, the next option.
    StartTls,
    /// The end of the connection.
    Leave,
    /// The transmission phase with this export, the index among those there were.
    Transmission(usize, Agreed),
}

/// A handshake under way.
#[derive(Debug, Clone, Default)]
pub struct Negotiation {
    tls: Tls,
    fixed: bool,
    no_zeroes: bool,
    mode: ReplyMode,
    /// The metadata contexts that were chosen, and of which export.
    contexts: Option<(String, Contexts)>,
}

impl Negotiation {
    /// Returns the negotiation with a client that has not begun TLS.
    pub fn new(tls: Tls) -> Self {
        Negotiation { tls, ..Negotiation::default() }
    }

    /// Returns what the server sends first (doc/proto.md, "Newstyle negotiation").
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Takes the client's flags, which answer the greeting.
    ///
    /// # Errors
    ///
    /// There are unknown ones among them.
    pub fn client_flags(&mut self, flags: u32) -> Result<(), HandshakeError> {
        let has = |flag: u16| flags & u32::from(flag) != 0;
        self.fixed = has(handshake_flag::FIXED_NEWSTYLE);
        self.no_zeroes = has(handshake_flag::NO_ZEROES);
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        if flags & !u32::from(known) == 0 { Ok(()) } else { Err(HandshakeError::Flags(flags)) }
    }

    /// Takes an option and appends the answer to `out`.
    ///
    /// The answer is to be sent whatever comes next.
    ///
    /// # Errors
    ///
    /// The connection is to be closed without another word.
    pub fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &[Arc<ExportInfo>],
        out: &mut Vec<u8>,
    ) -> Result<Next, HandshakeError> {
        let parsed = ClientOption::parse(option, data);
        let leaves_plain = matches!(parsed, Ok(ClientOption::StartTls | ClientOption::Abort));
        if self.tls == Tls::Required && self.fixed && !leaves_plain && option != code::EXPORT_NAME {
            // Whatever it is, and whatever is wrong with it.
            let why = "this server takes options only with TLS";
            Answer { option, out }.refuse(OptionError::TlsRequired, why);
            return Ok(Next::Option);
        }
        if let Ok(ClientOption::ExportName(name)) = parsed {
            return self.export_name(name, exports, out);
        }
        if !self.fixed {
            return Err(HandshakeError::NotFixed(option));
        }
        let mut answer = Answer { option, out };
        match parsed {
            Err(Invalid(why)) if option == code::EXPORT_NAME => {
                return Err(HandshakeError::Refused(why.into()));
            }
            Err(Invalid(why)) => answer.refuse(OptionError::Invalid, why),
            Ok(ClientOption::ExportName(_)) => {}
            Ok(ClientOption::Abort) => {
                answer.put(OptionReply::Ack);
                return Ok(Next::Leave);
            }
            Ok(ClientOption::StartTls) => match self.tls {
                Tls::Off => answer.refuse(OptionError::Policy, "TLS not configured"),
                Tls::On => answer.refuse(OptionError::Invalid, "TLS is under way already"),
                Tls::Required => {
                    answer.put(OptionReply::Ack);
                    // Nothing was agreed on before that could have been forged.
                    self.tls = Tls::On;
                    return Ok(Next::StartTls);
                }
            },
            Ok(ClientOption::List) => {
                for export in exports {
                    let ExportInfo { name, description, .. } = &**export;
                    answer.put(OptionReply::Server { name, description });
                }
                answer.put(OptionReply::Ack);
            }
            Ok(ClientOption::Info(request)) => {
                self.tell(&request, exports, &mut answer);
            }
            Ok(ClientOption::Go(request)) => {
                if let Some(index) = self.tell(&request, exports, &mut answer) {
                    let agreed = self.agreed(&exports[index]);
                    return Ok(Next::Transmission(index, agreed));
                }
            }
            Ok(ClientOption::StructuredReply) if self.mode == ReplyMode::Extended => {
                answer.refuse(OptionError::ExtendedHeaders, EXTENDED_ALREADY);
            }
            Ok(ClientOption::StructuredReply) if self.mode == ReplyMode::Structured => {
                answer.refuse(OptionError::Invalid, "structured reply already negotiated");
            }
            Ok(ClientOption::StructuredReply) => {
                self.mode = ReplyMode::Structured;
                answer.put(OptionReply::Ack);
            }
            Ok(ClientOption::ExtendedHeaders) if self.mode == ReplyMode::Extended => {
                answer.refuse(OptionError::Invalid, EXTENDED_ALREADY);
            }
            Ok(ClientOption::ExtendedHeaders) => {
                self.mode = ReplyMode::Extended;
                answer.put(OptionReply::Ack);
            }
            Ok(ClientOption::ListMetaContext(contexts)) => {
                if let Some(export) = self.find_for_contexts(&contexts, exports, &mut answer) {
                    for context in export.contexts(&contexts.queries, true).iter() {
                        let name = &export.context_name(context);
                        answer.put(OptionReply::MetaContext { id: 0, name });
                    }
                    answer.put(OptionReply::Ack);
                }
            }
            Ok(ClientOption::SetMetaContext(contexts)) => {
                self.contexts = None;
                if let Some(export) = self.find_for_contexts(&contexts, exports, &mut answer) {
                    let chosen = export.contexts(&contexts.queries, false);
                    for context in chosen.iter() {
                        let (id, name) = (context.id(), &export.context_name(context));
                        answer.put(OptionReply::MetaContext { id, name });
                    }
                    answer.put(OptionReply::Ack);
                    self.contexts = Some((contexts.name.to_owned(), chosen));
                }
            }
            Ok(ClientOption::Unknown) => {
                answer.refuse(OptionError::Unsupported, "this server does not have that option");
            }
        }
        Ok(Next::Option)
    }

    fn export_name(
        &self,
        name: &str,
        exports: &[Arc<ExportInfo>],
        out: &mut Vec<u8>,
    ) -> Result<Next, HandshakeError> {
        if self.tls == Tls::Required {
            return Err(HandshakeError::Refused("it does not begin TLS, which is required".into()));
        }
        if self.mode == ReplyMode::Extended {
            let why = "NBD_OPT_EXPORT_NAME after extended headers were negotiated";
            return Err(HandshakeError::Refused(why.into()));
        }
        let Some(index) = find(name, exports) else {
            return Err(HandshakeError::Refused(format!("there is no export '{name}'")));
        };
        let export = &exports[index];
        out.extend(export.size.to_be_bytes());
        out.extend(export.flags(self.mode).to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Ok(Next::Transmission(index, self.agreed(export)))
    }

    /// Answers `NBD_OPT_INFO` and `NBD_OPT_GO`; the index of the export, if there is one.
    fn tell(
        &self,
        request: &InfoRequest<'_>,
        exports: &[Arc<ExportInfo>],
        answer: &mut Answer<'_>,
    ) -> Option<usize> {
        let Some(index) = find(request.name, exports) else {
            answer.refuse(OptionError::Unknown, &not_present(request.name));
            return None;
        };
        let export = &exports[index];
        if request.wants_name {
            answer.put(OptionReply::Name(&export.name));
        }
        if request.wants_description && !export.description.is_empty() {
            answer.put(OptionReply::Description(&export.description));
        }
        // The node reads, modifies and writes blocks of which a request has a part.
        let (minimum, preferred) = (1, export.preferred_block);
        answer.put(OptionReply::BlockSize { minimum, preferred, maximum: MAX_PAYLOAD });
        let flags = export.flags(self.mode);
        answer.put(OptionReply::Export { size: export.size, flags });
        answer.put(OptionReply::Ack);
        Some(index)
    }

    /// The export that contexts are asked of, if that can be asked for now; refuses it if not.
    fn find_for_contexts<'a>(
        &self,
        queries: &Queries<'_>,
        exports: &'a [Arc<ExportInfo>],
        answer: &mut Answer<'_>,
    ) -> Option<&'a ExportInfo> {
        if self.mode == ReplyMode::Simple {
            answer.refuse(OptionError::Invalid, "structured replies are to be negotiated first");
            return None;
        }
        let found = find(queries.name, exports).and_then(|index| exports.get(index));
        if found.is_none() {
            answer.refuse(OptionError::Unknown, &not_present(queries.name));
        }
        found.map(|export| &**export)
    }

    fn agreed(&self, export: &ExportInfo) -> Agreed {
        Agreed {
            size: export.size,
            read_only: export.read_only,
            mode: self.mode,
            contexts: match &self.contexts {
                Some((name, contexts)) if *name == export.name => *contexts,
                _ => Contexts::default(),
            },
        }
    }
}

fn find(name: &str, exports: &[Arc<ExportInfo>]) -> Option<usize> {
    exports.iter().position(|export| export.name == name)
}

/// Returns QSD's error for an export that does not exist.
fn not_present(name: &str) -> String {
    match name.len() {
        ..SHOWN_NAME => format!("export '{name}' not present"),
        _ => {
            let shown = (0..=SHOWN_NAME).rev().find_map(|end| name.get(..end)).unwrap_or_default();
            format!("export '{shown}...' not present")
        }
    }
}

/// The answer to an option, in the making.
struct Answer<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl Answer<'_> {
    fn put(&mut self, reply: OptionReply<'_>) {
        reply.encode(self.option, self.out);
    }

    fn refuse(&mut self, error: OptionError, why: &str) {
        self.put(OptionReply::Error(error, why));
    }
}
