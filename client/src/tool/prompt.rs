//! What the model is told beside the `bash` tool itself: how to go about background tasks, and the standing policy of its session.
use dsh_policy::SandboxMode;

/// Name of the prompt's section that goes with the task tools.
pub const TASKS_SECTION: &str = "tool:tasks";
/// Where that section stands among the others.
pub const TASKS_ORDER: u32 = 106;
/// The section.
pub const TASKS: &str = "Keep track of the ids of background tasks that you start. A notice tells when one has finished, so do not poll in a loop: \
                         go on with other work, or wait with task_output. Before your final answer, collect the output of every task that still \
                         matters and kill the others.";

/// What the model is told about `mode` when it first holds and at each change. It speaks of effects only, so that it is true whatever tools there are.
///
/// ```
/// use dsh_client::tool::prompt::standing_policy;
/// use dsh_policy::SandboxMode;
///
/// assert_eq!(
///     standing_policy(SandboxMode::ReadOnly),
///     "From now on commands run under read-only mode: no file on this machine can be created, changed or removed."
/// );
/// ```
#[must_use]
pub fn standing_policy(mode: SandboxMode) -> String {
    let effects = match mode {
        SandboxMode::ReadOnly => "no file on this machine can be created, changed or removed",
        SandboxMode::WorkspaceWrite => {
            "files can be changed in the workspace, in temporary folders and where the deployment allows it, and nowhere else"
        }
        SandboxMode::DangerFullAccess => "they are not confined and can change whatever this user can",
    };
    format!("From now on commands run under {mode} mode: {effects}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standing_policy_names_no_tool_and_no_argument() {
        for mode in SandboxMode::ALL {
            let text = standing_policy(*mode);
            for word in [
                "sandbox_permissions",
                "justification",
                "bash",
                "escalat",
                "approv",
                "tool",
            ] {
                assert!(!text.contains(word), "{text}");
            }
            assert!(text.contains(mode.as_str()));
        }
    }
}
