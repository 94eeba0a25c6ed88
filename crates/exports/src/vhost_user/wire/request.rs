//! The requests: numbers, names, payload lengths and descriptors.

macro_rules! requests {
    ($($name:ident = $code:literal $text:literal),* $(,)?) => {
        /// The requests that a session understands.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "named as in the specification")]
        pub enum Request { $($name = $code),* }

        impl Request {
            /// All of them.
            pub const ALL: &[Request] = &[$(Request::$name),*];

            /// Returns its name in the specification, without `VHOST_USER_`.
            pub fn name(self) -> &'static str {
                match self { $(Request::$name => $text),* }
            }
        }
    };
}

requests! {
    GetFeatures = 1 "GET_FEATURES",
    SetFeatures = 2 "SET_FEATURES",
    SetOwner = 3 "SET_OWNER",
    ResetOwner = 4 "RESET_OWNER",
    SetMemTable = 5 "SET_MEM_TABLE",
    SetLogBase = 6 "SET_LOG_BASE",
    SetLogFd = 7 "SET_LOG_FD",
    SetVringNum = 8 "SET_VRING_NUM",
    SetVringAddr = 9 "SET_VRING_ADDR",
    SetVringBase = 10 "SET_VRING_BASE",
    GetVringBase = 11 "GET_VRING_BASE",
    SetVringKick = 12 "SET_VRING_KICK",
    SetVringCall = 13 "SET_VRING_CALL",
    SetVringErr = 14 "SET_VRING_ERR",
    GetProtocolFeatures = 15 "GET_PROTOCOL_FEATURES",
    SetProtocolFeatures = 16 "SET_PROTOCOL_FEATURES",
    GetQueueNum = 17 "GET_QUEUE_NUM",
    SetVringEnable = 18 "SET_VRING_ENABLE",
    SetBackendReqFd = 21 "SET_BACKEND_REQ_FD",
    GetConfig = 24 "GET_CONFIG",
    SetConfig = 25 "SET_CONFIG",
    GetInflightFd = 31 "GET_INFLIGHT_FD",
    SetInflightFd = 32 "SET_INFLIGHT_FD",
    ResetDevice = 34 "RESET_DEVICE",
    GetMaxMemSlots = 36 "GET_MAX_MEM_SLOTS",
    AddMemReg = 37 "ADD_MEM_REG",
    RemMemReg = 38 "REM_MEM_REG",
    SetStatus = 39 "SET_STATUS",
    GetStatus = 40 "GET_STATUS",
}

impl Request {
    /// Returns the request with the number `code`, if it is known.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|&request| request as u32 == code)
    }

    /// Returns whether the specification defines a specific reply.
    ///
    /// Such a reply replaces an acknowledgement.
    pub fn has_reply(self) -> bool {
        matches!(
            self,
            Request::GetFeatures
                | Request::GetProtocolFeatures
                | Request::GetQueueNum
                | Request::GetVringBase
                | Request::GetConfig
                | Request::GetMaxMemSlots
                | Request::GetStatus
                | Request::GetInflightFd
                | Request::SetLogBase
        )
    }

    /// Bytes of the shortest payload.
    ///
    /// What follows is ignored: SPDK's front end, for one, sends the whole buffer with SET_CONFIG.
    pub(super) fn payload_len(self) -> usize {
        match self {
            Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetStatus
            | Request::SetOwner
            | Request::ResetOwner
            | Request::SetBackendReqFd
            | Request::SetLogFd
            | Request::ResetDevice => 0,
            Request::SetFeatures
            | Request::SetProtocolFeatures
            | Request::SetStatus
            | Request::SetVringKick
            | Request::SetVringCall
            | Request::SetVringErr
            | Request::SetVringNum
            | Request::SetVringBase
            | Request::GetVringBase
            | Request::SetVringEnable
            | Request::SetMemTable => 8,
            Request::GetConfig | Request::SetConfig => 12,
            Request::SetLogBase => 16,
            // Without the padding of C's struct.
            Request::GetInflightFd | Request::SetInflightFd => 20,
            Request::SetVringAddr | Request::AddMemReg | Request::RemMemReg => 40,
        }
    }
}

/// Returns the name of the request with the number `code`, for texts.
///
/// The name is that of the specification, or the number.
pub fn request_name(code: u32) -> String {
    let unsupported = match code {
        19 => "SEND_RARP",
        20 => "NET_SET_MTU",
        22 => "IOTLB_MSG",
        23 => "SET_VRING_ENDIAN",
        26 => "CREATE_CRYPTO_SESSION",
        27 => "CLOSE_CRYPTO_SESSION",
        28 => "POSTCOPY_ADVISE",
        29 => "POSTCOPY_LISTEN",
        30 => "POSTCOPY_END",
        33 => "GPU_SET_SOCKET",
        35 => "VRING_KICK",
        41 => "GET_SHARED_OBJECT",
        42 => "SET_DEVICE_STATE_FD",
        43 => "CHECK_DEVICE_STATE",
        44 => "GET_SHMEM_CONFIG",
        _ => match Request::from_code(code) {
            Some(request) => request.name(),
            None => return format!("request {code}"),
        },
    };
    unsupported.to_owned()
}
