//! Asking for a wider mode. Everything is closed until somebody has said yes, and a yes is for one call.
use std::pin::Pin;

use dsh_policy::SandboxMode;

use super::error::ToolError;

/// A wider mode for one call, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Escalation {
    /// The mode that is asked for.
    pub target: SandboxMode,
    /// The reason that the model gives.
    pub justification: String,
}

/// What the user is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRequest {
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

/// Who asks, for whom, and who keeps the record.
#[derive(Clone, Copy)]
pub struct Route<'a> {
    /// Asks the user.
    pub approver: Option<&'a dyn Approver>,
    /// On whose behalf.
    pub agent: Option<&'a str>,
    /// Hears of every decision.
    pub record: &'a (dyn Fn(&EscalationRecord) + Send + Sync),
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
    current: SandboxMode,
    route: Route<'_>,
) -> Result<SandboxMode, ToolError> {
    let mut asked = None;
    let outcome = ask(command, escalation, current, route, &mut asked).await;
    (route.record)(&EscalationRecord {
        request: asked,
        target: escalation.target,
        current,
        outcome: outcome.as_ref().map(|_| ()).map_err(ToString::to_string),
    });
    outcome
}

async fn ask(
    command: &str,
    escalation: &Escalation,
    current: SandboxMode,
    route: Route<'_>,
    asked: &mut Option<ApprovalRequest>,
) -> Result<SandboxMode, ToolError> {
    let target = escalation.target;
    if target <= current {
        return Err(ToolError::NotWider { target, current });
    }
    let approver = route.approver.ok_or(ToolError::NoApprover(target))?;
    let agent = route.agent.ok_or(ToolError::NoAgent(target))?;
    let request = asked.insert(ApprovalRequest {
        agent: agent.to_owned(),
        command: command.to_owned(),
        current,
        target,
        reason: format!("escalate sandbox to {target}: {}", escalation.justification),
    });
    match approver.ask(request).await {
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
            record: &record,
        };
        let outcome = decide("ls", &escalation, current, route).await;
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
}
