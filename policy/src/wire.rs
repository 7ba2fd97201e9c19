//! What a client and the daemon say to each other. Versioned and public: docs/protocol.md describes the same for other languages.
//!
//! Each message is one frame. The first frame of each side is a [`Hello`] / [`HelloReply`] in JSON; after that both use the encoding the client chose.
use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{self, CodecError, Decode, Encode};
use crate::denial::DenialFact;
use crate::environment::EnvironmentRules;
use crate::error::ExecError;
use crate::explain::PathAnswer;
use crate::mode::named_enum;
use crate::probe::ProbeReport;
use crate::request::{BashExecRequest, BashExecSpec, TerminalSize};
use crate::result::BashRunResult;
use crate::task::{Cursor, TaskInfo, TaskOutput, WaitFor};

/// A peer with another major version is refused; a newer minor one is tolerated.
pub const PROTOCOL: ProtocolVersion = ProtocolVersion { major: 1, minor: 0 };

/// Bytes of standard input that a client may have on their way for one request: sent, and not yet told of by `inputTaken`. Within this, the daemon keeps
/// what the command does not read yet and goes on reading the connection. A client that sends more is read more slowly, its other messages too.
pub const INPUT_WINDOW: u32 = 1024 * 1024;

/// Version of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProtocolVersion {
    /// Changes when an older peer would misunderstand.
    pub major: u16,
    /// Changes when something was added.
    pub minor: u16,
}

impl std::fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

named_enum! {
    /// How messages after the hello are encoded.
    Encoding {
        /// Compact, for the Rust client of the same version.
        Bincode = "bincode",
        /// For every other language.
        Json = "json",
    }
}

/// First frame of a client, always JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// Version of the client.
    pub protocol: ProtocolVersion,
    /// Encoding of everything that follows.
    pub encoding: Encoding,
    /// Name and version of the program, for logs.
    #[serde(default)]
    pub client: String,
    /// [`BUILD_ID`](crate::plan::BUILD_ID) of a client that asks for `bincode`, whose layout is that of one build.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub build: String,
}

/// First frame of the daemon, always JSON. After an `error` it closes the connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HelloReply {
    /// Version of the daemon.
    pub protocol: ProtocolVersion,
    /// Name and version of the daemon.
    pub server: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Encoding of everything that follows: the one that was asked for, or `json` when that would not be understood.
    #[serde(default = "json")]
    pub encoding: Encoding,
    /// The deployment's additions to the rules by which a client scrubs the environment that it sends.
    #[serde(default)]
    pub environment: EnvironmentRules,
    /// What it can do beyond the protocol's minimum (`run`, `stdin`, `doctor`, …).
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// Why the connection is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ExecError>,
}

fn json() -> Encoding {
    Encoding::Json
}

impl Hello {
    /// The encoding that both sides understand.
    #[must_use]
    pub fn common_encoding(&self) -> Encoding {
        if self.build == crate::plan::BUILD_ID {
            self.encoding
        } else {
            Encoding::Json
        }
    }
}

/// Client to daemon. `id` is chosen by the client and names the request in every answer; it must not be in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ClientMessage {
    /// Run a command. Answers: `started`, any number of `output` and `denial`, then `finished` or `error`.
    Run {
        /// Name of this request.
        id: u64,
        /// What to run.
        request: Box<BashExecRequest>,
        /// Whether `output` events are wanted (the result has the tail either way).
        #[serde(default)]
        stream: bool,
    },
    /// More standard input for a request with `stdinOpen`.
    Stdin {
        /// Which request.
        id: u64,
        /// The bytes.
        data: ByteString,
        /// No more will come.
        #[serde(default)]
        eof: bool,
    },
    /// Another size for the terminal of a request with `tty`; its programs get SIGWINCH. No answer of its own.
    Resize {
        /// Which request.
        id: u64,
        /// The new size.
        size: TerminalSize,
    },
    /// End a running request; its answer is still `finished` (with `aborted`), or `error` when it had not started.
    Cancel {
        /// Which request.
        id: u64,
    },
    /// What a request would become, without running it. Answer: `resolved` or `error`.
    Resolve {
        /// Name of this request.
        id: u64,
        /// What would be run.
        request: Box<BashExecRequest>,
    },
    /// How the daemon is. Answer: `status`.
    Status {
        /// Name of this request.
        id: u64,
    },
    /// Probe this host afresh. Answer: `probe`.
    Probe {
        /// Name of this request.
        id: u64,
    },
    /// The configuration in force. Answer: `config`.
    Config {
        /// Name of this request.
        id: u64,
    },
    /// Which operations on paths a request would be allowed, without running anything. Answer: `explained` or `error`.
    Explain {
        /// Name of this request.
        id: u64,
        /// What would be run.
        request: Box<BashExecRequest>,
        /// Relative ones are meant from its working directory.
        paths: Vec<ByteString>,
    },
    /// Run a command in the background (`lifetime` `session`). Answer: `taskStarted` or `error`. It does not end with the connection.
    Start {
        /// Name of this request.
        id: u64,
        /// What to run; its `session` owns the task.
        request: Box<BashExecRequest>,
    },
    /// What a task has written. Answer: `taskOutput` or `error`.
    TaskRead {
        /// Name of this request.
        id: u64,
        /// Who asks: only the owner gets an answer.
        #[serde(default)]
        session: Option<String>,
        /// Which task.
        task: String,
        /// From here; without it from where the last such read ended.
        #[serde(default)]
        cursor: Option<Cursor>,
        /// What to wait for first.
        #[serde(default)]
        wait: WaitFor,
        /// How long, at most; 30 000 by default, 600 000 at most.
        #[serde(default)]
        timeout_ms: Option<u64>,
    },
    /// The tasks of a session, and those without one. Answer: `tasks`.
    TaskList {
        /// Name of this request.
        id: u64,
        /// Who asks.
        #[serde(default)]
        session: Option<String>,
    },
    /// End a task. Answer: `taskKilled`, at once, or `error`.
    TaskKill {
        /// Name of this request.
        id: u64,
        /// Who asks.
        #[serde(default)]
        session: Option<String>,
        /// Which task.
        task: String,
        /// For the log.
        #[serde(default)]
        reason: Option<String>,
    },
    /// End a session: all its tasks, whose output is gone then. Answer: `sessionEnded`, when nothing of them is left.
    SessionEnd {
        /// Name of this request.
        id: u64,
        /// Which session.
        session: String,
    },
    /// Be told of tasks of a session that end. Answers: `notice`, one for each, until the connection closes.
    Notices {
        /// Name of this request.
        id: u64,
        /// Which session; none is the tasks without one.
        #[serde(default)]
        session: Option<String>,
    },
    /// A kind that this version does not know; ignored.
    #[serde(other)]
    Unknown,
}

/// Daemon to client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ServerMessage {
    /// The shell is running.
    Started {
        /// Which request.
        id: u64,
        /// Process id of the shell.
        pid: u32,
        /// What the request was resolved to.
        spec: Box<BashExecSpec>,
    },
    /// Bytes as they were written.
    Output {
        /// Which request.
        id: u64,
        /// Which stream.
        stream: StreamName,
        /// Position of the first byte in its stream; a gap means that a slow reader missed bytes (they are in the spill file).
        offset: u64,
        /// The bytes.
        data: ByteString,
    },
    /// A refusal, when it is seen for the first time.
    Denial {
        /// Which request.
        id: u64,
        /// The fact so far.
        fact: Box<DenialFact>,
    },
    /// The command has ended. Last answer of a request.
    Finished {
        /// Which request.
        id: u64,
        /// What happened.
        result: Box<BashRunResult>,
    },
    /// Nothing ran, or its fate is unknown. Last answer of a request.
    Error {
        /// Which request; absent when the failure is of the connection.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<u64>,
        /// Why.
        error: ExecError,
    },
    /// Answer of `resolve`.
    Resolved {
        /// Which request.
        id: u64,
        /// What it becomes.
        spec: Box<BashExecSpec>,
    },
    /// Answer of `status`.
    Status {
        /// Which request.
        id: u64,
        /// How the daemon is.
        status: Box<DaemonStatus>,
    },
    /// Answer of `probe`.
    Probe {
        /// Which request.
        id: u64,
        /// What the host can enforce.
        report: Box<ProbeReport>,
    },
    /// Answer of `config`.
    Config {
        /// Which request.
        id: u64,
        /// The configuration in force, as TOML with every default.
        toml: String,
        /// The file it was read from, whether or not it exists.
        path: ByteString,
    },
    /// How much standard input has gone to the command, or was dropped because it does not read any more. See [`INPUT_WINDOW`].
    InputTaken {
        /// Which request.
        id: u64,
        /// Bytes since the start of the request.
        bytes: u64,
    },
    /// Answer of `explain`.
    Explained {
        /// Which request.
        id: u64,
        /// In the order of the question.
        paths: Vec<PathAnswer>,
    },
    /// Answer of `start`: the task is registered and its command runs, or waits for its turn.
    TaskStarted {
        /// Which request.
        id: u64,
        /// The task.
        task: TaskInfo,
    },
    /// Answer of `taskRead`.
    TaskOutput {
        /// Which request.
        id: u64,
        /// What was written.
        output: Box<TaskOutput>,
    },
    /// Answer of `taskList`.
    Tasks {
        /// Which request.
        id: u64,
        /// Oldest first.
        tasks: Vec<TaskInfo>,
    },
    /// Answer of `taskKill`.
    TaskKilled {
        /// Which request.
        id: u64,
        /// The task; still running, unless it had ended before.
        task: TaskInfo,
    },
    /// Answer of `sessionEnd`.
    SessionEnded {
        /// Which request.
        id: u64,
        /// How many tasks it had.
        tasks: u32,
    },
    /// A task has ended, and nobody has been told of it before.
    Notice {
        /// Which request.
        id: u64,
        /// The task.
        task: TaskInfo,
    },
    /// A kind that this version does not know; ignored.
    #[serde(other)]
    Unknown,
}

named_enum! {
    /// One of the two output streams.
    StreamName {
        /// Standard output.
        Stdout = "stdout",
        /// Standard error.
        Stderr = "stderr",
    }
}

/// How the daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Name and version.
    pub server: String,
    /// Process id.
    pub pid: u32,
    /// Milliseconds since it started.
    pub uptime_ms: u64,
    /// Requests running now, background tasks among them.
    pub running: u32,
    /// Background tasks that are known: running, or ended and still readable.
    #[serde(default)]
    pub tasks: u32,
    /// Connections open now.
    pub connections: u32,
    /// Requests finished since the start.
    pub finished: u64,
    /// Requests that ended in an infrastructure failure since the start.
    pub failed: u64,
    /// The socket it listens on.
    pub socket: ByteString,
    /// The tier in use; absent when nothing is usable or the probe is not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<crate::mode::Tier>,
    /// Whether it is draining.
    pub draining: bool,
}

impl Encoding {
    /// Encodes a message and puts it in a frame.
    ///
    /// # Errors
    /// [`CodecError::Encode`] when it is larger than a frame.
    pub fn frame<T: Serialize + Encode>(self, message: &T) -> Result<Vec<u8>, CodecError> {
        crate::frame::encode(&match self {
            Self::Bincode => codec::to_binary(message)?,
            Self::Json => codec::to_json(message)?,
        })
    }

    /// Decodes a client's message; a kind of a newer version becomes [`ClientMessage::Unknown`].
    ///
    /// # Errors
    /// [`CodecError`] when the bytes are no message.
    pub fn client_message(self, payload: &[u8]) -> Result<ClientMessage, CodecError> {
        match self {
            Self::Json => codec::from_json(payload),
            Self::Bincode => tolerate(codec::from_binary(payload), ClientMessage::Unknown),
        }
    }

    /// Decodes the daemon's message; a kind of a newer version becomes [`ServerMessage::Unknown`].
    ///
    /// # Errors
    /// [`CodecError`] when the bytes are no message.
    pub fn server_message(self, payload: &[u8]) -> Result<ServerMessage, CodecError> {
        match self {
            Self::Json => codec::from_json(payload),
            Self::Bincode => tolerate(codec::from_binary(payload), ServerMessage::Unknown),
        }
    }
}

fn tolerate<T>(decoded: Result<T, CodecError>, unknown: T) -> Result<T, CodecError> {
    match decoded {
        Err(CodecError::UnknownKind(_)) => Ok(unknown),
        other => other,
    }
}
