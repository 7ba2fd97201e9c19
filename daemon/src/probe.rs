//! What this host can enforce: asked of the helper once, remembered, and asked again on request.
use std::sync::Arc;
use std::time::{Duration, Instant};

use dsh_policy::mode::{Guarantee, SandboxMode, Tier};
use dsh_policy::probe::{ProbeReport, TierReport};
use dsh_policy::{ErrorCode, ExecError};
use tokio::sync::watch;

use crate::helper::Helpers;

const DEADLINE: Duration = Duration::from_secs(10);
/// A host that was found unusable is looked at again for a request that comes later than this.
const BAD_NEWS: Duration = Duration::from_secs(5);

/// The outcome of a probe; the error is for people.
pub(crate) type Outcome = Result<Arc<ProbeReport>, String>;

/// The remembered outcome. Whoever asks before the first one is there waits for it.
#[derive(Debug)]
pub(crate) struct Probe {
    latest: watch::Sender<Option<(Instant, Outcome)>>,
}

impl Probe {
    pub(crate) fn new() -> Self {
        Self {
            latest: watch::Sender::new(None),
        }
    }

    /// Asks the helper and remembers the answer. A host that seems unusable is asked twice: a busy moment must not refuse every command.
    pub(crate) async fn refresh(&self, helpers: &Arc<Helpers>) -> Outcome {
        let mut outcome = ask(helpers).await;
        if !is_usable(&outcome) {
            outcome = ask(helpers).await;
        }
        match &outcome {
            Ok(report) => tracing::info!(
                tier = report.best_tier().map(Tier::as_str),
                landlock = report.landlock_abi,
                "probed what this host can enforce"
            ),
            Err(error) => tracing::error!(error, "the probe of this host failed"),
        }
        self.latest.send_replace(Some((Instant::now(), outcome.clone())));
        outcome
    }

    /// The outcome to judge a request by: the remembered one, unless it is bad news that may have passed.
    pub(crate) async fn current(&self, helpers: &Arc<Helpers>) -> Outcome {
        let (when, outcome) = self.remembered().await;
        if is_usable(&outcome) || when.elapsed() < BAD_NEWS {
            return outcome;
        }
        self.refresh(helpers).await
    }

    /// The last outcome, once there is one.
    async fn remembered(&self) -> (Instant, Outcome) {
        let mut latest = self.latest.subscribe();
        let found = match latest.wait_for(Option::is_some).await {
            Ok(found) => found.clone(),
            Err(_) => None,
        };
        found.unwrap_or_else(|| (Instant::now(), Err("not probed".into())))
    }

    /// The best usable tier, without waiting.
    pub(crate) fn tier(&self, allowed: &[Tier]) -> Option<Tier> {
        let latest = self.latest.borrow();
        let report = latest.as_ref()?.1.as_ref().ok()?;
        allowed
            .iter()
            .copied()
            .find(|tier| report.tiers.iter().any(|found| found.tier == *tier && found.usable))
    }
}

fn is_usable(outcome: &Outcome) -> bool {
    outcome.as_ref().is_ok_and(|report| report.best_tier().is_some())
}

async fn ask(helpers: &Arc<Helpers>) -> Outcome {
    let printed = helpers.probe(DEADLINE).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&printed)
        .map(Arc::new)
        .map_err(|error| format!("the helper's probe is unintelligible: {error}"))
}

/// The first allowed tier that is usable and keeps every required guarantee.
pub(crate) fn choose(
    outcome: &Outcome,
    allowed: &[Tier],
    required: &[Guarantee],
    mode: SandboxMode,
) -> Result<Tier, ExecError> {
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            return Err(ExecError::sandbox_unavailable(
                mode,
                "The host could not be probed.",
                Some(error),
            ));
        }
    };
    let usable: Vec<&TierReport> = allowed
        .iter()
        .filter_map(|tier| report.tiers.iter().find(|found| found.tier == *tier && found.usable))
        .collect();
    if let Some(found) = usable.iter().find(|found| lacking(found, required).is_empty()) {
        return Ok(found.tier);
    }
    let missing = match usable.first() {
        Some(best) => {
            let names: Vec<String> = lacking(best, required).iter().map(ToString::to_string).collect();
            format!(
                "The configuration requires {}, which this host cannot guarantee (best tier: {}).",
                names.join(", "),
                best.tier
            )
        }
        None => describe_missing(report, allowed),
    };
    let advice = report.advice.join(" ");
    Err(ExecError::sandbox_unavailable(
        mode,
        format!("{missing} {advice}").trim_end(),
        None,
    ))
}

fn lacking(found: &TierReport, required: &[Guarantee]) -> Vec<Guarantee> {
    required
        .iter()
        .copied()
        .filter(|guarantee| found.unenforced.iter().any(|missing| missing.guarantee == *guarantee))
        .collect()
}

fn describe_missing(report: &ProbeReport, allowed: &[Tier]) -> String {
    let mut parts = vec![format!(
        "Linux {} on {}: Landlock ABI {}",
        report.kernel, report.arch, report.landlock_abi
    )];
    if let Some(lsm) = &report.lsm {
        parts.push(format!("security modules {lsm}"));
    }
    parts.push(format!(
        "seccomp filters {}",
        if report.seccomp_filter { "usable" } else { "missing" }
    ));
    match &report.user_namespaces_reason {
        Some(reason) if !report.user_namespaces => parts.push(format!("user namespaces unusable ({reason})")),
        _ => {}
    }
    for found in &report.tiers {
        match &found.reason {
            _ if !allowed.contains(&found.tier) => {
                parts.push(format!("tier {} is excluded by the configuration", found.tier))
            }
            Some(reason) => parts.push(format!("tier {} fails: {reason}", found.tier)),
            None => {}
        }
    }
    parts.join("; ") + "."
}

/// The failure for a helper that could not be had before anything ran.
pub(crate) fn runner_failure(mode: SandboxMode, detail: &str) -> ExecError {
    if mode.confines() {
        ExecError::sandbox_unavailable(mode, "", Some(detail))
    } else {
        ExecError::new(
            ErrorCode::Internal,
            format!("the command could not be started: {detail}"),
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::result::Unenforced;

    fn report(namespace: bool, landlock: bool) -> Outcome {
        let tier = |tier, usable: bool, guarantee| TierReport {
            tier,
            usable,
            reason: (!usable).then(|| "namespaces: EPERM".into()),
            unenforced: vec![Unenforced {
                guarantee,
                reason: "r".into(),
            }],
        };
        Ok(Arc::new(ProbeReport {
            kernel: "6.1".into(),
            arch: "x86_64".into(),
            lsm: None,
            landlock_abi: 0,
            seccomp_filter: true,
            seccomp_notify: true,
            seccomp_notify_reason: None,
            user_namespaces: namespace,
            user_namespaces_reason: None,
            tiers: vec![
                tier(Tier::Namespace, namespace, Guarantee::Limits),
                tier(Tier::Landlock, landlock, Guarantee::ProtectedPaths),
            ],
            advice: vec!["Boot with lsm=landlock.".into()],
        }))
    }

    #[test]
    fn the_first_allowed_tier_that_keeps_what_is_required_is_taken() {
        let pick = |outcome: &Outcome, allowed: &[Tier], required: &[Guarantee]| {
            choose(outcome, allowed, required, SandboxMode::ReadOnly).ok()
        };
        assert_eq!(pick(&report(true, true), Tier::ALL, &[]), Some(Tier::Namespace));
        assert_eq!(
            pick(&report(true, true), Tier::ALL, &[Guarantee::Limits]),
            Some(Tier::Landlock)
        );
        assert_eq!(pick(&report(true, true), &[Tier::Landlock], &[]), Some(Tier::Landlock));
        assert_eq!(pick(&report(false, true), &[Tier::Namespace], &[]), None);
    }

    #[test]
    fn a_refusal_says_what_is_missing_and_what_to_do() {
        let error = choose(&report(false, false), Tier::ALL, &[], SandboxMode::WorkspaceWrite).unwrap_err();
        assert_eq!(error.code, ErrorCode::SandboxUnavailable);
        let head = "sandbox mode \"workspace-write\" is requested but no sandbox backend is usable on this host; refusing to run the command unconfined. Linux 6.1 on x86_64: Landlock ABI 0";
        assert!(error.message.starts_with(head), "{}", error.message);
        assert!(
            error
                .message
                .ends_with("tier landlock fails: namespaces: EPERM. Boot with lsm=landlock."),
            "{}",
            error.message
        );
        let required = choose(
            &report(false, true),
            Tier::ALL,
            &[Guarantee::ProtectedPaths],
            SandboxMode::ReadOnly,
        )
        .unwrap_err();
        assert!(
            required.message.contains("requires protected-paths"),
            "{}",
            required.message
        );
    }
}
