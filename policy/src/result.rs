//! What happened, as data: exit, streams, what the sandbox refused, usage.
use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::denial::DenialFact;
use crate::mode::{EnforcementLevel, Guarantee, Network, SandboxMode, Tier};

/// The outcome of one foreground command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct BashRunResult {
    /// Exit code of the shell; null exactly when `signal` is set.
    pub exit_code: Option<i32>,
    /// Name of the signal that ended the shell (`SIGKILL`).
    pub signal: Option<String>,
    /// The time limit ended the command (whatever its exit code was then).
    pub timed_out: bool,
    /// A cancel ended the command. Never together with `timedOut`.
    pub aborted: bool,
    /// The limit that applied.
    pub timeout_ms: u64,
    /// Standard output.
    pub stdout: StreamResult,
    /// Standard error.
    pub stderr: StreamResult,
    /// What confined it and what was refused.
    pub sandbox: SandboxReport,
    /// What was taken out of its environment.
    pub environment: EnvironmentReport,
    /// Processes of the command still alive when this was delivered; 0 is proved by the kernel.
    pub survivors: u32,
    /// What it used.
    pub usage: Usage,
}

/// One stream: its tail, its exact length, and where all of it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct StreamResult {
    /// The tail as text: invalid UTF-8 replaced visibly, no character cut in half.
    pub text: String,
    /// More was written than `text` holds.
    pub truncated: bool,
    /// Bytes written in total.
    pub bytes: u64,
    /// The file that has the whole stream, when it was truncated and fits the spill cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spill_path: Option<ByteString>,
    /// The exact bytes of the tail, present only when `text` cannot show them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<ByteString>,
}

/// What confined a command. Under `danger-full-access` only `mode` and `denied` are present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", try_from = "DecodedReport")]
pub struct SandboxReport {
    /// The mode that was applied.
    pub mode: SandboxMode,
    /// At least one refusal, and the command did not succeed. Null when refusals could not be observed.
    pub denied: Option<bool>,
    /// The rest, when the command was confined.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub confined: Option<ConfinedReport>,
}

/// What arrives: a confined command whose report is not whole must not pass for an unconfined one.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
struct DecodedReport {
    mode: SandboxMode,
    denied: Option<bool>,
    #[serde(flatten)]
    confined: Option<ConfinedReport>,
}

impl TryFrom<DecodedReport> for SandboxReport {
    type Error = &'static str;

    fn try_from(decoded: DecodedReport) -> Result<Self, Self::Error> {
        if decoded.mode.confines() && decoded.confined.is_none() {
            return Err("the report of a confined command is incomplete");
        }
        Ok(Self {
            mode: decoded.mode,
            denied: decoded.denied,
            confined: decoded.confined,
        })
    }
}

/// What confined a command in a confining mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ConfinedReport {
    /// Whether all of the policy was enforced.
    pub enforcement: EnforcementLevel,
    /// The guarantees that this host cannot give, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unenforced: Vec<Unenforced>,
    /// What enforced it.
    pub tier: Tier,
    /// The network axis that was applied.
    pub network: Network,
    /// The mode that was asked for, when a bound of the deployment made it narrower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_mode: Option<SandboxMode>,
    /// Whether refusals were observed; then the list is complete.
    pub observed: bool,
    /// Why they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unobserved_reason: Option<String>,
    /// What was refused.
    pub denials: Vec<DenialFact>,
    /// Refusals beyond the number of facts that are kept.
    pub denials_dropped: u64,
}

/// A promise that was not kept, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Unenforced {
    /// Which promise.
    pub guarantee: Guarantee,
    /// Why not, and what would give it.
    pub reason: String,
}

/// What was taken out of a command's environment: names, never values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentReport {
    /// Names in order.
    pub removed: Vec<ByteString>,
}

/// What a command and all of its descendants used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// From start to the end of the last process, milliseconds.
    pub wall_ms: u64,
    /// User time of all reaped descendants, milliseconds.
    pub user_ms: u64,
    /// System time of all reaped descendants, milliseconds.
    pub system_ms: u64,
    /// Largest resident size of any one process, KiB.
    pub max_rss_kib: u64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn under_full_access_the_sandbox_report_is_exactly_two_fields() {
        let report = SandboxReport {
            mode: SandboxMode::DangerFullAccess,
            denied: Some(false),
            confined: None,
        };
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(json, r#"{"mode":"danger-full-access","denied":false}"#);
        assert_eq!(serde_json::from_str::<SandboxReport>(&json).unwrap(), report);
    }

    #[test]
    fn a_confined_command_without_its_report_is_not_understood() {
        let incomplete = r#"{"mode":"read-only","denied":false,"tier":"landlock"}"#;
        let error = serde_json::from_str::<SandboxReport>(incomplete).unwrap_err();
        assert!(error.to_string().contains("incomplete"), "{error}");
    }

    #[test]
    fn an_unobserved_run_has_a_null_denied_and_no_spill_path_means_no_key() {
        let report = SandboxReport {
            mode: SandboxMode::ReadOnly,
            denied: None,
            confined: None,
        };
        assert!(serde_json::to_string(&report).unwrap().contains(r#""denied":null"#));
        assert!(
            !serde_json::to_string(&StreamResult::default())
                .unwrap()
                .contains("spillPath")
        );
    }
}
