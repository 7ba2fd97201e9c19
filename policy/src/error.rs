//! Infrastructure failures: why a command did not run, or why its fate is unknown. A command that ran is a result, never an error.
use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};
use crate::mode::named_enum;

named_enum! {
    /// What kind of failure, for programs.
    ErrorCode {
        /// The request itself is wrong.
        InvalidRequest = "INVALID_REQUEST",
        /// The working directory cannot be used.
        WorkdirUnusable = "WORKDIR_UNUSABLE",
        /// `bash` is not on this host.
        ShellMissing = "SHELL_MISSING",
        /// The requested confinement cannot be enforced here; nothing ran.
        SandboxUnavailable = "SANDBOX_UNAVAILABLE",
        /// Cancelled before it started.
        Cancelled = "CANCELLED",
        /// The daemon is shutting down.
        ShuttingDown = "SHUTTING_DOWN",
        /// Over a limit of the deployment.
        LimitExceeded = "LIMIT_EXCEEDED",
        /// The command started but its fate is not known. Never to be taken as success.
        Unknown = "UNKNOWN",
        /// The daemon cannot be reached or was lost.
        Unreachable = "UNREACHABLE",
        /// The two sides speak different protocols.
        ProtocolMismatch = "PROTOCOL_MISMATCH",
        /// A file or process resource of the daemon failed.
        Internal = "INTERNAL",
    }
}

/// An infrastructure failure, with what a person can do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode, thiserror::Error)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[error("{message}")]
#[serde(rename_all = "camelCase")]
pub struct ExecError {
    /// For programs.
    pub code: ErrorCode,
    /// For people: what is wrong and what to do.
    pub message: String,
}

impl ExecError {
    /// A failure of `code` that says `message`.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The contract's refusal to run unconfined: fixed first sentence, then what is missing and what to do, then the helper's own failure.
    #[must_use]
    pub fn sandbox_unavailable(mode: crate::mode::SandboxMode, missing: &str, runner_failure: Option<&str>) -> Self {
        let mut message = format!(
            "sandbox mode \"{mode}\" is requested but no sandbox backend is usable on this host; refusing to run the command unconfined."
        );
        if !missing.is_empty() {
            message.push(' ');
            message.push_str(missing);
        }
        if let Some(detail) = runner_failure {
            message.push_str(" Runner failure: ");
            message.push_str(detail);
        }
        Self::new(ErrorCode::SandboxUnavailable, message)
    }
}
