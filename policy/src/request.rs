//! What a caller asks for, and what resolution makes of it.
use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::error::{ErrorCode, ExecError};
use crate::mode::Lifetime;
use crate::policy::{PolicyRequest, SandboxPolicy};

/// Names to values. Values are bytes: an environment is not always UTF-8.
pub type EnvMap = BTreeMap<ByteString, ByteString>;

/// Size of a terminal, in characters. Neither is 0 in a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

impl TerminalSize {
    /// Refuses a size that no terminal has; `field` is how the message calls it.
    ///
    /// # Errors
    /// `INVALID_REQUEST`.
    pub fn check(self, field: &str) -> Result<(), ExecError> {
        if self.rows > 0 && self.cols > 0 {
            return Ok(());
        }
        Err(ExecError::new(
            ErrorCode::InvalidRequest,
            format!(
                "invalid {field}: expected rows and cols from 1 to 65535, got {} and {}",
                self.rows, self.cols
            ),
        ))
    }
}

/// One command to run. Only `command` is required.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BashExecRequest {
    /// What `bash -c` gets.
    pub command: ByteString,
    /// Working directory; relative to the session's workspace when not absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<ByteString>,
    /// Time limit in milliseconds; capped by the deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Bytes of stdout to keep for this one call; capped by the deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_max_bytes: Option<u64>,
    /// Written to the command's standard input, which is then closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<ByteString>,
    /// The client will send `stdin` frames; the input stays open until one says `eof`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub stdin_open: bool,
    /// The command gets a terminal of this size: its three streams are that terminal, and all output is `stdout`. What `stdin` frames bring is typed;
    /// without `stdinOpen`, or at its `eof`, the end of the file is typed. Only for a command that is waited for, and without `stdin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<TerminalSize>,
    /// Deliberate values; they win over every rule but cannot set a `DSH_*` name.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::bytes::named")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<std::collections::BTreeMap<String, ByteString>>")
    )]
    pub env: Option<EnvMap>,
    /// Managed values; every name must start with `DSH_`.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::bytes::named")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<std::collections::BTreeMap<String, ByteString>>")
    )]
    pub dsh_env: Option<EnvMap>,
    /// What confinement is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_policy: Option<PolicyRequest>,
    /// The caller's session, opaque.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// What the calling process has in its environment; the daemon's own is used when absent.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::bytes::named")]
    #[cfg_attr(
        feature = "schema",
        schemars(with = "Option<std::collections::BTreeMap<String, ByteString>>")
    )]
    pub ambient_env: Option<EnvMap>,
    /// Names that the caller took out of `ambientEnv` before sending it; the result lists them with the daemon's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ambient_removed: Vec<ByteString>,
    /// The caller's file mode creation mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask: Option<u32>,
    /// Run as a background task.
    #[serde(default, skip_serializing_if = "is_false")]
    pub background: bool,
    /// What may outlive what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime: Option<Lifetime>,
    /// For display only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature serde asks for
fn is_false(value: &bool) -> bool {
    !*value
}

/// Values of environment and stdin may be secrets: logs and errors show names and lengths only.
impl fmt::Debug for BashExecRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |map: &Option<EnvMap>| map.as_ref().map(|map| map.keys().cloned().collect::<Vec<_>>());
        f.debug_struct("BashExecRequest")
            .field("command_bytes", &self.command.0.len())
            .field("workdir", &self.workdir)
            .field("timeout_ms", &self.timeout_ms)
            .field("stdout_max_bytes", &self.stdout_max_bytes)
            .field("stdin_bytes", &self.stdin.as_ref().map(|bytes| bytes.0.len()))
            .field("env_names", &names(&self.env))
            .field("dsh_env_names", &names(&self.dsh_env))
            .field("sandbox_policy", &self.sandbox_policy)
            .field("session", &self.session)
            .field("ambient_env_size", &self.ambient_env.as_ref().map(BTreeMap::len))
            .field("background", &self.background)
            .field("lifetime", &self.lifetime)
            .finish_non_exhaustive()
    }
}

/// A request with every default filled in, every cap applied and every path resolved once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BashExecSpec {
    /// What `bash -c` gets; no NUL bytes, not blank.
    pub command: ByteString,
    /// Working directory, absolute and canonical.
    pub workdir: ByteString,
    /// Time limit in milliseconds.
    pub timeout_ms: u64,
    /// Bytes of stdout to keep.
    pub stdout_max_bytes: u64,
    /// The whole confinement.
    pub sandbox_policy: SandboxPolicy,
    /// The caller's file mode creation mask.
    pub umask: u32,
    /// What may outlive what.
    pub lifetime: Lifetime,
    /// The terminal that it gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<TerminalSize>,
    /// The caller's session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

impl fmt::Debug for BashExecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BashExecSpec")
            .field("command_bytes", &self.command.0.len())
            .field("workdir", &self.workdir)
            .field("timeout_ms", &self.timeout_ms)
            .field("sandbox_policy", &self.sandbox_policy)
            .field("lifetime", &self.lifetime)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}
