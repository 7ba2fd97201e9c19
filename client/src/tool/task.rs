//! Background tasks as a model reads them: increments of output, states, lists, answers to a kill, notices.
use std::pin::Pin;

use dsh_policy::result::SandboxReport;
use dsh_policy::task::{TaskInfo, TaskOutput, TaskStatus};
use dsh_policy::{BashExecRequest, ByteString};

use crate::ClientError;
use crate::tool::render::{add_sandbox, add_section};

/// An answer that comes later. Dropping it takes the question back.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Starts commands that nobody waits for.
pub trait TaskStarter: Send + Sync {
    /// Whether a task could be started now, or why not: the runtime is there, no limit is reached. Comes before anybody is asked for an approval.
    fn preflight<'a>(&'a self, session: Option<&'a str>) -> Pending<'a, Result<(), String>>;

    /// Registers a running task and gives its id, or leaves nothing behind and says why.
    fn start(&self, request: BashExecRequest) -> Pending<'_, Result<String, ClientError>>;
}

/// What one read of a task gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRead {
    /// What was written since the read before.
    pub delta: String,
    /// Something was dropped before it was read.
    pub lossy: bool,
    /// The files that have all of it, as far as there are any.
    pub spill_paths: Vec<ByteString>,
    /// What confined it. Its refusals are told once the task has settled.
    pub sandbox: SandboxReport,
    /// It has ended.
    pub settled: bool,
    /// The helper failed before the command ran.
    pub runner_failed: bool,
}

/// The text of a read; empty when there is nothing to say.
///
/// ```
/// use dsh_client::tool::task::{ProcessRead, render_process_read};
/// use dsh_policy::SandboxMode;
/// use dsh_policy::result::SandboxReport;
///
/// let sandbox = SandboxReport { mode: SandboxMode::DangerFullAccess, denied: Some(false), confined: None };
/// let read = ProcessRead {
///     delta: "listening\n".into(), lossy: true, spill_paths: vec!["/s/1".into()], sandbox, settled: false, runner_failed: false,
/// };
/// assert_eq!(
///     render_process_read(&read, false),
///     "listening\n[some output was dropped from memory; full output: /s/1]"
/// );
/// ```
#[must_use]
pub fn render_process_read(read: &ProcessRead, escalation_offered: bool) -> String {
    let mut text = read.delta.clone();
    if read.lossy {
        let paths: Vec<String> = read.spill_paths.iter().map(ByteString::display).collect();
        let paths = if paths.is_empty() {
            "(unavailable)".to_owned()
        } else {
            paths.join(", ")
        };
        add_section(
            &mut text,
            &format!("[some output was dropped from memory; full output: {paths}]"),
        );
    }
    if read.runner_failed {
        let mode = read.sandbox.mode;
        add_section(
            &mut text,
            &format!(
                "[sandbox: the sandbox runner itself failed under {mode} mode — the command did not run; this is a sandbox problem, not a command failure]"
            ),
        );
    } else if read.settled {
        add_sandbox(&mut text, &read.sandbox, escalation_offered);
    }
    text
}

/// `[status: completed, exit code: 4]`
#[must_use]
pub fn status_text(status: &TaskStatus) -> String {
    format!("[status: {status}]")
}

/// What the owner is told once when a task has finished and nothing told it before.
#[must_use]
pub fn notice_text(task: &TaskInfo) -> String {
    let (label, status) = (one_line(&task.label), status_text(&task.status));
    format!(
        "background task {} ({}: {label}) finished {status}. Read its output with task_output.",
        task.task, task.kind
    )
}

impl From<TaskOutput> for ProcessRead {
    /// The streams one after the other, as in the text of a foreground call.
    fn from(output: TaskOutput) -> Self {
        let mut delta = output.stdout.display();
        if !output.stderr.0.is_empty() {
            add_section(&mut delta, "[stderr]");
            add_section(&mut delta, &output.stderr.display());
        }
        let settled = output.info.status.is_terminal();
        let sandbox = output.result.map(|result| result.sandbox);
        Self {
            delta,
            lossy: output.lossy,
            spill_paths: output.spill_paths,
            sandbox: sandbox.unwrap_or(SandboxReport {
                mode: output.mode,
                denied: None,
                confined: None,
            }),
            settled,
            runner_failed: output.runner_failed,
        }
    }
}

/// The answer of `bash` that has started a task.
#[must_use]
pub fn started_text(id: &str) -> String {
    format!("started background task {id}")
}

/// The answer of `task_output`.
#[must_use]
pub fn output_text(read: &ProcessRead, status: &TaskStatus, escalation_offered: bool) -> String {
    let mut text = render_process_read(read, escalation_offered);
    if text.is_empty() {
        text.push_str("(no new output)");
    }
    add_section(&mut text, &status_text(status));
    text
}

/// The answer of `task_list`.
#[must_use]
pub fn list_text(tasks: &[TaskInfo]) -> String {
    if tasks.is_empty() {
        return "(no background tasks)".to_owned();
    }
    let line = |task: &TaskInfo| {
        let label = one_line(&task.label);
        format!("{} [{}] {} — {label}", task.task, task.kind, task.status)
    };
    tasks.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The answer of `task_kill`; `before` is how the task was when it was asked to end.
#[must_use]
pub fn kill_text(id: &str, before: &TaskStatus) -> String {
    match before {
        TaskStatus::Running => format!("requested cancellation of task {id}"),
        ended => format!("task {id} had already finished {}", status_text(ended)),
    }
}

/// A label is the model's own words; a line break in it would look like another entry.
fn one_line(label: &str) -> String {
    label.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::codec::from_json;

    fn read(delta: &str) -> ProcessRead {
        let sandbox = from_json(
            br#"{"mode":"read-only","denied":false,"enforcement":"full","tier":"landlock","network":"full","observed":true,
                "denials":[],"denialsDropped":0}"#,
        );
        ProcessRead {
            delta: delta.into(),
            lossy: false,
            spill_paths: Vec::new(),
            sandbox: sandbox.unwrap(),
            settled: false,
            runner_failed: false,
        }
    }

    fn lossy(delta: &str, paths: &[&str]) -> ProcessRead {
        ProcessRead {
            lossy: true,
            spill_paths: paths.iter().map(|path| (*path).into()).collect(),
            ..read(delta)
        }
    }

    fn denied(delta: &str, settled: bool) -> ProcessRead {
        let mut read = read(delta);
        read.sandbox.denied = Some(true);
        ProcessRead { settled, ..read }
    }

    fn failed(delta: &str) -> ProcessRead {
        ProcessRead {
            runner_failed: true,
            ..denied(delta, true)
        }
    }

    const DENIED: &str = "[sandbox: file access denied under read-only mode]";
    const OFFER: &str = "[sandbox: escalation available — retry this exact command once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]";
    const FAILED: &str = "[sandbox: the sandbox runner itself failed under read-only mode — the command did not run; this is a sandbox problem, not a command failure]";

    #[test]
    fn a_read_is_the_delta_then_what_was_lost_then_the_sandbox() {
        let dropped = |paths: &str| format!("[some output was dropped from memory; full output: {paths}]");
        for (name, read, expected) in [
            ("nothing", read(""), String::new()),
            ("delta", read("a\n"), "a\n".into()),
            ("no newline", read("a"), "a".into()),
            ("lossy", lossy("a", &["/s/1"]), format!("a\n{}", dropped("/s/1"))),
            (
                "lossy, two",
                lossy("a\n", &["/s/1", "/s/2"]),
                format!("a\n{}", dropped("/s/1, /s/2")),
            ),
            ("lossy, no file", lossy("", &[]), dropped("(unavailable)")),
            ("denied, running", denied("a", false), "a".into()),
            ("denied, settled", denied("a", true), format!("a\n{DENIED}")),
            ("runner", failed(""), FAILED.into()),
            ("runner, output", failed("a\n"), format!("a\n{FAILED}")),
        ] {
            assert_eq!(render_process_read(&read, false), expected, "{name}");
        }
        let mut all = lossy("a", &["/s/1"]);
        (all.sandbox.denied, all.settled) = (Some(true), true);
        assert_eq!(
            render_process_read(&all, true),
            format!("a\n{}\n{DENIED}\n{OFFER}", dropped("/s/1"))
        );
    }

    #[test]
    fn the_state_is_the_last_line_of_an_output() {
        let status = TaskStatus::Running;
        assert_eq!(
            output_text(&read(""), &status, false),
            "(no new output)\n[status: running]"
        );
        assert_eq!(output_text(&read("a"), &status, false), "a\n[status: running]");
        assert_eq!(output_text(&read("a\n"), &status, false), "a\n[status: running]");
        assert_eq!(
            output_text(&denied("", true), &TaskStatus::Completed { exit_code: 1 }, false),
            format!("{DENIED}\n[status: completed, exit code: 1]")
        );
        assert_eq!(
            output_text(
                &failed(""),
                &TaskStatus::Failed {
                    reason: "sandbox runner".into()
                },
                true
            ),
            format!("{FAILED}\n[status: failed, sandbox runner]")
        );
    }

    #[test]
    fn every_state_has_its_text() {
        for (status, text) in [
            (TaskStatus::Running, "[status: running]"),
            (
                TaskStatus::Completed { exit_code: 4 },
                "[status: completed, exit code: 4]",
            ),
            (
                TaskStatus::Completed { exit_code: 0 },
                "[status: completed, exit code: 0]",
            ),
            (
                TaskStatus::Killed {
                    signal: Some("SIGTERM".into()),
                },
                "[status: killed, signal: SIGTERM]",
            ),
            (
                TaskStatus::Killed { signal: None },
                "[status: killed, killed before exit]",
            ),
            (
                TaskStatus::Failed {
                    reason: "daemon lost".into(),
                },
                "[status: failed, daemon lost]",
            ),
        ] {
            assert_eq!(status_text(&status), text);
        }
    }

    fn entry(id: &str, status: TaskStatus, label: &str) -> TaskInfo {
        TaskInfo {
            task: id.into(),
            session: None,
            kind: "bash".into(),
            lifetime: dsh_policy::mode::Lifetime::Session,
            status,
            label: label.into(),
        }
    }

    #[test]
    fn a_list_has_one_line_for_each_task() {
        assert_eq!(list_text(&[]), "(no background tasks)");
        let tasks = [
            entry("bash-1", TaskStatus::Running, "Serve\nthe site"),
            entry("bash-2", TaskStatus::Completed { exit_code: 4 }, "Build"),
        ];
        assert_eq!(
            list_text(&tasks),
            "bash-1 [bash] running — Serve the site\nbash-2 [bash] completed, exit code: 4 — Build"
        );
    }

    #[test]
    fn starting_killing_and_finishing_are_told() {
        assert_eq!(started_text("bash-1"), "started background task bash-1");
        assert_eq!(
            kill_text("bash-1", &TaskStatus::Running),
            "requested cancellation of task bash-1"
        );
        assert_eq!(
            kill_text("bash-1", &TaskStatus::Completed { exit_code: 0 }),
            "task bash-1 had already finished [status: completed, exit code: 0]"
        );
        assert_eq!(
            notice_text(&entry(
                "bash-1",
                TaskStatus::Killed {
                    signal: Some("SIGTERM".into())
                },
                "Serve"
            )),
            "background task bash-1 (bash: Serve) finished [status: killed, signal: SIGTERM]. Read its output with task_output."
        );
    }
}
