//! Background tasks as clients see them: what they are, how they are, what they have written.
use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::mode::{Lifetime, SandboxMode, named_enum};
use crate::result::BashRunResult;

/// How a task is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TaskStatus {
    /// Its command has not ended.
    Running,
    /// The shell ended by itself.
    Completed {
        /// With this code.
        exit_code: i32,
    },
    /// The shell was ended: by a signal, or on request.
    Killed {
        /// The signal; none when the shell answered the request by an exit of its own.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<String>,
    },
    /// An infrastructure failure: nothing ran, or the fate is unknown.
    Failed {
        /// The failure.
        reason: String,
    },
}

impl TaskStatus {
    /// Whether nothing of it runs any more.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        !matches!(self, Self::Running)
    }
}

/// `running`, `completed, exit code: 4`, `killed, signal: SIGTERM`, `killed, killed before exit`, `failed, <what>`.
impl std::fmt::Display for TaskStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::Completed { exit_code } => write!(f, "completed, exit code: {exit_code}"),
            Self::Killed { signal: Some(signal) } => write!(f, "killed, signal: {signal}"),
            Self::Killed { signal: None } => f.write_str("killed, killed before exit"),
            Self::Failed { reason } => write!(f, "failed, {reason}"),
        }
    }
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TaskInfo {
    /// `bash-1`: unique in the life of a daemon.
    pub task: String,
    /// What kind of work: `bash`.
    pub kind: String,
    /// The request's description, else its command, on one line.
    pub label: String,
    /// The session that owns it; without one it is open to every client of the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// `session`: it ends with its session and with the daemon; `detached`: with neither.
    #[serde(default = "session")]
    pub lifetime: Lifetime,
    /// How it is.
    pub status: TaskStatus,
}

fn session() -> Lifetime {
    Lifetime::Session
}

named_enum! {
    /// What a read waits for.
    #[derive(Default)]
    WaitFor {
        /// Nothing.
        #[default]
        Nothing = "nothing",
        /// Something new, or the end.
        Output = "output",
        /// The end.
        End = "end",
    }
}

/// Positions in the two streams of a task, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cursor {
    /// In standard output.
    pub stdout: u64,
    /// In standard error.
    pub stderr: u64,
}

/// What one read of a task gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TaskOutput {
    /// The task, as it is after the read.
    pub info: TaskInfo,
    /// Standard output since the cursor.
    pub stdout: ByteString,
    /// Standard error since the cursor.
    pub stderr: ByteString,
    /// Where the next read goes on.
    pub next: Cursor,
    /// Output between the cursor and what is given has left the memory.
    pub lossy: bool,
    /// The files that have the whole streams, once the task has ended and when something left the memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spill_paths: Vec<ByteString>,
    /// The mode that was asked for, or the deployment's; the result has the one that was applied.
    pub mode: SandboxMode,
    /// The helper failed before the command ran.
    #[serde(default)]
    pub runner_failed: bool,
    /// What became of the command, once it has ended; its facts are in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<BashRunResult>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_its_words() {
        let rows = [
            (TaskStatus::Running, "running"),
            (TaskStatus::Completed { exit_code: 4 }, "completed, exit code: 4"),
            (
                TaskStatus::Killed {
                    signal: Some("SIGTERM".into()),
                },
                "killed, signal: SIGTERM",
            ),
            (TaskStatus::Killed { signal: None }, "killed, killed before exit"),
            (TaskStatus::Failed { reason: "x".into() }, "failed, x"),
        ];
        for (status, words) in rows {
            assert_eq!(status.to_string(), words);
            assert_eq!(status.is_terminal(), words != "running");
        }
    }
}
