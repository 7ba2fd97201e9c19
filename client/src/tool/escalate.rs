//! Asking for a wider mode. Everything is closed until somebody has said yes, and a yes is for one call.
use std::path::Path;
use std::pin::Pin;

use dsh_policy::SandboxMode;
use serde::Serialize;

use super::error::ToolError;
use super::log::{EventLog, LogError, now_ms};

/// A wider mode for one call, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Escalation {
    /// The mode that is asked for.
    pub target: SandboxMode,
    /// The reason that the model gives.
    pub justification: String,
}

/// What the user is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ApprovalRequest {
    /// The session of the call.
    pub session: Option<String>,
    /// The agent on whose behalf.
    pub agent: String,
    /// What would run.
    pub command: String,
    /// In force now.
    pub current: SandboxMode,
    /// Asked for.
    pub target: SandboxMode,
    /// `escalate sandbox to <target>: <justification>`.
    pub reason: String,
}

/// What the user says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Approval {
    /// Yes, for this call.
    AllowedOnce,
    /// No.
    Rejected,
    /// The question was withdrawn.
    Cancelled,
    /// The user cannot be reached.
    Unavailable,
}

/// An answer that is on its way.
pub type PendingApproval<'a> = Pin<Box<dyn Future<Output = Approval> + Send + 'a>>;

/// Whoever can ask the user. A question that is not waited for any more is dropped.
pub trait Approver: Send + Sync {
    /// Whether asking could succeed. If not, a wider mode is not offered, and whoever asks for one all the same hears why.
    fn is_reachable(&self) -> bool {
        true
    }

    /// Asks. May take as long as a person does.
    fn ask<'a>(&'a self, request: &'a ApprovalRequest) -> PendingApproval<'a>;
}

/// One decision, for the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EscalationRecord {
    /// What was asked; none when nobody was.
    pub request: Option<ApprovalRequest>,
    /// The mode that was asked for.
    pub target: SandboxMode,
    /// The mode that was in force.
    pub current: SandboxMode,
    /// Granted, or the message that said no.
    pub outcome: Result<(), String>,
}

/// Keeps the record of escalations where it lasts.
pub trait Audit: Send + Sync {
    /// Keeps `record`.
    ///
    /// # Errors
    /// When it is not kept. An approval then does not count.
    fn keep(&self, record: &EscalationRecord) -> Result<(), String>;
}

/// An append-only file of JSON lines. A decision is on the disk before anything runs.
#[derive(Debug)]
pub struct AuditFile(EventLog);

impl AuditFile {
    /// Opens it, or makes it for its user alone.
    ///
    /// # Errors
    /// When it cannot be used.
    pub fn open(path: &Path) -> Result<Self, LogError> {
        EventLog::open(path).map(Self)
    }
}

/// A line of the file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AuditLine<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    time_ms: u64,
    target: SandboxMode,
    current: SandboxMode,
    /// None when nobody was asked.
    request: Option<&'a ApprovalRequest>,
    granted: bool,
    /// What said no.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
}

impl Audit for AuditFile {
    fn keep(&self, record: &EscalationRecord) -> Result<(), String> {
        let line = AuditLine {
            kind: "sandbox/escalation",
            time_ms: now_ms(),
            target: record.target,
            current: record.current,
            request: record.request.as_ref(),
            granted: record.outcome.is_ok(),
            message: record.outcome.as_ref().err().map(String::as_str),
        };
        self.0.append(&line).map_err(|error| error.to_string())
    }
}

/// Who asks, for whom, and who keeps the record.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// Asks the user.
    pub approver: Option<&'a dyn Approver>,
    /// On whose behalf.
    pub agent: Option<&'a str>,
    /// The session of the call.
    pub session: Option<&'a str>,
    /// Hears of every decision.
    pub record: &'a (dyn Fn(&EscalationRecord) + Send + Sync),
    /// Has to keep every decision.
    pub audit: Option<&'a dyn Audit>,
}

/// The modes in question, after the bounds of the deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// What the call has.
    pub current: SandboxMode,
    /// What a yes would give it: what is asked for, or less where a bound says so.
    pub reachable: SandboxMode,
}

impl std::fmt::Debug for Route<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route")
            .field("agent", &self.agent)
            .finish_non_exhaustive()
    }
}

/// Decides whether `command` may run in the mode that `escalation` asks for. A request that is not wider never asks anybody.
///
/// # Errors
/// The reason why not; then nothing may run.
pub async fn decide(
    command: &str,
    escalation: &Escalation,
    modes: Modes,
    route: Route<'_>,
) -> Result<SandboxMode, ToolError> {
    let target = escalation.target;
    let mut undecided = Undecided {
        route,
        record: Some(EscalationRecord {
            request: None,
            target,
            current: modes.current,
            outcome: Err(ToolError::Aborted.to_string()),
        }),
    };
    let outcome = ask(command, escalation, modes, route, &mut undecided).await;
    let kept = undecided.settle(outcome.as_ref().map(|_| ()).map_err(ToString::to_string));
    match (outcome, kept) {
        (Ok(_), Err(reason)) => Err(ToolError::Unaudited { target, reason }),
        // Nothing runs either way, and the decision is the better answer.
        (outcome, _) => outcome,
    }
}

/// A decision that has still to be made. A call that is given up while the user is asked leaves its record all the same.
struct Undecided<'a> {
    route: Route<'a>,
    record: Option<EscalationRecord>,
}

impl Undecided<'_> {
    fn settle(&mut self, outcome: Result<(), String>) -> Result<(), String> {
        let Some(mut record) = self.record.take() else {
            return Ok(());
        };
        record.outcome = outcome;
        let kept = self.route.audit.map_or(Ok(()), |audit| audit.keep(&record));
        if let (Err(reason), Ok(())) = (&kept, &record.outcome) {
            record.outcome = Err(reason.clone());
        }
        (self.route.record)(&record);
        kept
    }
}

impl Drop for Undecided<'_> {
    fn drop(&mut self) {
        // Nobody waits for this call any more, so nobody can be told that its record was not kept.
        let _ = self.settle(Err(ToolError::Aborted.to_string()));
    }
}

async fn ask(
    command: &str,
    escalation: &Escalation,
    modes: Modes,
    route: Route<'_>,
    undecided: &mut Undecided<'_>,
) -> Result<SandboxMode, ToolError> {
    let (target, current) = (escalation.target, modes.current);
    if !modes.reachable.is_strictly_wider_than(current) {
        return Err(ToolError::NotWider { target, current });
    }
    let approver = route.approver.ok_or(ToolError::NoApprover(target))?;
    let agent = route.agent.ok_or(ToolError::NoAgent(target))?;
    let request = ApprovalRequest {
        session: route.session.map(str::to_owned),
        agent: agent.to_owned(),
        command: command.to_owned(),
        current,
        target,
        reason: format!("escalate sandbox to {target}: {}", escalation.justification),
    };
    if let Some(record) = &mut undecided.record {
        record.request = Some(request.clone());
    }
    match approver.ask(&request).await {
        Approval::AllowedOnce => Ok(target),
        Approval::Rejected => Err(ToolError::Rejected(target)),
        Approval::Cancelled => Err(ToolError::ApprovalCancelled(target)),
        Approval::Unavailable => Err(ToolError::NoChannel(target)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Says(Approval, AtomicUsize);

    impl Approver for Says {
        fn ask<'a>(&'a self, request: &'a ApprovalRequest) -> PendingApproval<'a> {
            assert_eq!(request.reason, "escalate sandbox to danger-full-access: it must");
            self.1.fetch_add(1, Ordering::Relaxed);
            Box::pin(std::future::ready(self.0))
        }
    }

    async fn decided(
        approver: Option<&dyn Approver>,
        agent: Option<&str>,
        current: SandboxMode,
    ) -> (Result<SandboxMode, String>, Vec<EscalationRecord>) {
        let records = Mutex::new(Vec::new());
        let record = |record: &EscalationRecord| records.lock().unwrap().push(record.clone());
        let escalation = Escalation {
            target: SandboxMode::DangerFullAccess,
            justification: "it must".into(),
        };
        let route = Route {
            approver,
            agent,
            session: Some("s"),
            record: &record,
            audit: None,
        };
        let modes = Modes {
            current,
            reachable: SandboxMode::DangerFullAccess,
        };
        let outcome = decide("ls", &escalation, modes, route).await;
        (
            outcome.map_err(|error| error.to_string()),
            records.into_inner().unwrap(),
        )
    }

    #[tokio::test]
    async fn every_answer_has_its_outcome_and_is_recorded_once() {
        let rows = [
            (Approval::AllowedOnce, Ok(SandboxMode::DangerFullAccess)),
            (
                Approval::Rejected,
                Err("the user rejected escalating this command to \"danger-full-access\""),
            ),
            (
                Approval::Cancelled,
                Err("approval for escalating to \"danger-full-access\" was cancelled"),
            ),
            (
                Approval::Unavailable,
                Err(
                    "sandbox escalation to \"danger-full-access\" requires approval, but no approval channel is available",
                ),
            ),
        ];
        for (answer, expected) in rows {
            let approver = Says(answer, AtomicUsize::new(0));
            let (outcome, records) = decided(Some(&approver), Some("agent"), SandboxMode::ReadOnly).await;
            assert_eq!(outcome, expected.map_err(str::to_owned));
            assert_eq!(approver.1.into_inner(), 1);
            assert_eq!(records.len(), 1);
            assert_eq!(records[0].outcome, outcome.map(|_| ()));
            assert_eq!(records[0].request.as_ref().unwrap().agent, "agent");
        }
    }

    #[tokio::test]
    async fn nobody_is_asked_when_nothing_is_to_be_asked_or_nobody_can_be() {
        let approver = Says(Approval::AllowedOnce, AtomicUsize::new(0));
        type Row<'a> = (Option<&'a dyn Approver>, Option<&'a str>, SandboxMode, &'a str);
        let rows: [Row<'_>; 3] = [
            (
                Some(&approver),
                Some("agent"),
                SandboxMode::DangerFullAccess,
                "sandbox escalation to \"danger-full-access\" is not strictly wider than this call's current \"danger-full-access\" mode",
            ),
            (
                None,
                None,
                SandboxMode::ReadOnly,
                "sandbox escalation to \"danger-full-access\" requires approval, but no approval service is composed",
            ),
            (
                Some(&approver),
                None,
                SandboxMode::ReadOnly,
                "sandbox escalation to \"danger-full-access\" requires approval, but the call has no agent to route it through",
            ),
        ];
        for (approver, agent, current, message) in rows {
            let (outcome, records) = decided(approver, agent, current).await;
            assert_eq!(outcome.unwrap_err(), message);
            assert_eq!((records.len(), &records[0].request), (1, &None));
        }
        assert_eq!(approver.1.into_inner(), 0);
    }

    const TARGET: SandboxMode = SandboxMode::WorkspaceWrite;

    fn to_target() -> (Escalation, Modes) {
        let escalation = Escalation {
            target: TARGET,
            justification: "it must".into(),
        };
        let modes = Modes {
            current: SandboxMode::ReadOnly,
            reachable: TARGET,
        };
        (escalation, modes)
    }

    /// Says yes, or never anything.
    struct Yes(bool);

    impl Approver for Yes {
        fn ask<'a>(&'a self, _: &'a ApprovalRequest) -> PendingApproval<'a> {
            if self.0 {
                Box::pin(std::future::ready(Approval::AllowedOnce))
            } else {
                Box::pin(std::future::pending())
            }
        }
    }

    struct Full;

    impl Audit for Full {
        fn keep(&self, _: &EscalationRecord) -> Result<(), String> {
            Err("no space".into())
        }
    }

    fn route<'a>(approver: &'a Yes, audit: &'a dyn Audit) -> Route<'a> {
        Route {
            approver: Some(approver),
            agent: Some("agent"),
            session: Some("s"),
            record: &|_| {},
            audit: Some(audit),
        }
    }

    #[tokio::test]
    async fn an_approval_that_is_not_kept_does_not_count() {
        let (escalation, modes) = to_target();
        let error = decide("ls", &escalation, modes, route(&Yes(true), &Full))
            .await
            .unwrap_err();
        assert_eq!(
            error.text(),
            "Error: sandbox escalation to \"workspace-write\" is not carried out: its audit record cannot be written (no space)"
        );
    }

    #[tokio::test]
    async fn the_file_has_a_line_for_each_decision_also_for_one_that_was_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let file = AuditFile::open(&path).unwrap();
        let (escalation, modes) = to_target();
        assert_eq!(
            decide("ls", &escalation, modes, route(&Yes(true), &file))
                .await
                .unwrap(),
            TARGET
        );
        let waiting = Yes(false);
        let asking = decide("ls", &escalation, modes, route(&waiting, &file));
        let given_up = tokio::time::timeout(std::time::Duration::from_millis(20), asking).await;
        assert!(given_up.is_err());
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text
            .lines()
            .map(|line| {
                let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert!(line["timeMs"].take().as_u64() > Some(1_700_000_000_000));
                line
            })
            .collect();
        let mut expected = serde_json::json!({
            "type": "sandbox/escalation", "timeMs": null, "target": "workspace-write", "current": "read-only", "granted": true,
            "request": {"session": "s", "agent": "agent", "command": "ls", "current": "read-only", "target": "workspace-write",
                "reason": "escalate sandbox to workspace-write: it must"}
        });
        assert_eq!(lines[0], expected);
        expected["granted"] = false.into();
        expected["message"] = "tool call aborted".into();
        assert_eq!((lines.len(), &lines[1]), (2, &expected));
    }

    #[tokio::test]
    async fn what_a_bound_makes_no_wider_is_not_asked_about() {
        let (mut escalation, mut modes) = to_target();
        (escalation.target, modes.current) = (SandboxMode::DangerFullAccess, TARGET);
        let error = decide("ls", &escalation, modes, route(&Yes(true), &Full))
            .await
            .unwrap_err();
        assert_eq!(
            error.text(),
            "Error: sandbox escalation to \"danger-full-access\" is not strictly wider than this call's current \"workspace-write\" mode"
        );
    }
}
