//! Why a call of a tool gives no result. The messages are interface: programs and models match on them.
use dsh_policy::SandboxMode;

use crate::error::ClientError;

/// A call that has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// `command` is missing, no string, or blank.
    #[error("invalid command: expected a non-empty string")]
    Command,
    /// `description` is missing, no string, or blank.
    #[error("invalid description: expected a non-empty string")]
    Description,
    /// `timeoutMs` is no positive number; its JSON.
    #[error("invalid timeoutMs: expected a positive number, got {0}")]
    Timeout(String),
    /// `workdir` is no string, or empty; its JSON.
    #[error("invalid workdir: expected a non-empty string, got {0}")]
    Workdir(String),
    /// `run_in_background` is neither true nor false; its JSON.
    #[error("invalid run_in_background: expected a boolean, got {0}")]
    Background(String),
    /// `sandbox_permissions` is not a mode that can be asked for; its JSON.
    #[error("invalid sandbox_permissions: expected \"workspace-write\" or \"danger-full-access\", got {0}")]
    Permissions(String),
    /// A wider mode without a reason.
    #[error("invalid escalation: sandbox_permissions requires a justification")]
    NoJustification,
    /// A reason without a wider mode.
    #[error("invalid escalation: justification is only valid together with sandbox_permissions")]
    NoPermissions,
    /// The reason is no string, or blank.
    #[error("invalid justification: expected a non-empty sentence")]
    Justification,
    /// Background tasks are switched off.
    #[error("run_in_background is disabled for this deployment (enableRunInBackground: false)")]
    BackgroundDisabled,
    /// Background tasks are switched on and cannot be had; why.
    #[error("background tasks unavailable: {0}")]
    BackgroundUnavailable(String),
    /// Nothing confines, so nothing can be widened.
    #[error("sandbox_permissions is not available in this composition (no sandboxing executor to escalate)")]
    NotConfined,
    /// The mode that was asked for is not wider than the one in force.
    #[error("sandbox escalation to \"{target}\" is not strictly wider than this call's current \"{current}\" mode")]
    NotWider {
        /// Asked for.
        target: SandboxMode,
        /// In force.
        current: SandboxMode,
    },
    /// Nobody could be asked.
    #[error("sandbox escalation to \"{0}\" requires approval, but no approval service is composed")]
    NoApprover(SandboxMode),
    /// Nobody could be asked on behalf of this call.
    #[error("sandbox escalation to \"{0}\" requires approval, but the call has no agent to route it through")]
    NoAgent(SandboxMode),
    /// The user said no.
    #[error("the user rejected escalating this command to \"{0}\"")]
    Rejected(SandboxMode),
    /// The question was withdrawn.
    #[error("approval for escalating to \"{0}\" was cancelled")]
    ApprovalCancelled(SandboxMode),
    /// The user cannot be reached.
    #[error("sandbox escalation to \"{0}\" requires approval, but no approval channel is available")]
    NoChannel(SandboxMode),
    /// The approval could not be written down, so it does not count.
    #[error("sandbox escalation to \"{target}\" is not carried out: its audit record cannot be written ({reason})")]
    Unaudited {
        /// What was asked for.
        target: SandboxMode,
        /// Why not.
        reason: String,
    },
    /// `task_id` is missing, no string, or blank.
    #[error("invalid task_id: expected a non-empty string")]
    TaskId,
    /// `wait` is neither true nor false; its JSON.
    #[error("invalid wait: expected a boolean, got {0}")]
    Wait(String),
    /// `timeout_ms` is no positive number; its JSON.
    #[error("invalid timeout_ms: expected a positive number, got {0}")]
    TaskTimeout(String),
    /// The caller gave the call up.
    #[error("tool call aborted")]
    Aborted,
    /// A `DSH_*` variable of the command could not be had.
    #[error(transparent)]
    Environment(#[from] super::environment::EnvironmentError),
    /// Nothing ran, or its fate is unknown.
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl ToolError {
    /// What a model reads.
    #[must_use]
    pub fn text(&self) -> String {
        format!("Error: {self}")
    }
}
