//! Watching one helper: the clock, the reasons to stop, and a helper that dies or hangs.
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use dsh_policy::ExecError;
use dsh_policy::mode::{Lifetime, SandboxMode};
use dsh_policy::plan::{FromHelper, Plan, Report, ToHelper};
use dsh_policy::request::BashExecSpec;
use dsh_policy::wire::ServerMessage;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::control::Control;
use crate::helper::Helper;
use crate::outcome::{Cause, EnvironmentSize, Start, lost, setup_failure};
use crate::output::Events;
use crate::probe::runner_failure;
use crate::state::Settings;

/// What a helper may take beyond its own deadlines before it counts as stuck.
const SETUP_SLACK: Duration = Duration::from_secs(1);
const END_SLACK: Duration = Duration::from_secs(2);
/// How long a reader that stands still holds up the start.
const TELL_DEADLINE: Duration = Duration::from_millis(500);

/// What is known beforehand about a command.
pub(crate) struct Watch<'a> {
    spec: &'a BashExecSpec,
    environment: EnvironmentSize,
    settings: &'a Settings,
    events: Events,
    /// Opened once the client has been told of the start.
    gate: watch::Sender<bool>,
}

/// A command that has ended, with everything below it.
pub(crate) struct Finished {
    pub(crate) report: Report,
    pub(crate) start: Start,
    pub(crate) cause: Option<Cause>,
}

/// Where the command is.
struct Progress {
    start: Option<Start>,
    shell_exited: bool,
    cause: Option<Cause>,
    /// The command's time is over.
    timeout: Instant,
    /// The helper is stuck when nothing new has come by then.
    stuck: Instant,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        spec: &'a BashExecSpec,
        plan: &Plan,
        settings: &'a Settings,
        events: Events,
        gate: watch::Sender<bool>,
    ) -> Self {
        Self {
            spec,
            environment: EnvironmentSize::of(plan),
            settings,
            events,
            gate,
        }
    }

    fn mode(&self) -> SandboxMode {
        self.spec.sandbox_policy.mode
    }
}

/// Hands over the plan and stays until everything of the command has ended.
pub(crate) async fn run(
    mut helper: Helper,
    plan: Plan,
    streams: [OwnedFd; 3],
    watch: Watch<'_>,
    control: &mut Control,
) -> Result<Finished, ExecError> {
    let handed = helper
        .run(plan, [streams[0].as_fd(), streams[1].as_fd(), streams[2].as_fd()])
        .await;
    // Only the command may hold these now: the end of its output is the end of the last holder.
    drop(streams);
    if let Err(error) = handed {
        helper.destroy().await;
        return Err(runner_failure(watch.mode(), &error.to_string()));
    }
    match follow(&mut helper, &watch, control).await {
        Ok(finished) => {
            tokio::spawn(helper.retire());
            Ok(finished)
        }
        Err(Fate::NotRun(error)) => {
            tokio::spawn(helper.retire());
            Err(error)
        }
        Err(Fate::Lost(what)) => {
            let pid = helper.pid();
            let status = helper.destroy().await;
            let ending = status.map_or_else(|| "it could not be ended".into(), |status| status.to_string());
            tracing::error!(pid, what, ending, "a helper was lost");
            Err(lost(watch.mode(), &format!("{what} ({ending})")))
        }
    }
}

/// Why there is no report.
enum Fate {
    /// The set-up failed in good order.
    NotRun(ExecError),
    /// The helper cannot be trusted to end its command any more.
    Lost(&'static str),
}

async fn follow(helper: &mut Helper, watch: &Watch<'_>, control: &mut Control) -> Result<Finished, Fate> {
    let now = Instant::now();
    let far = now + Duration::from_secs(86_400 * 365);
    let setup = Duration::from_millis(watch.settings.config.setup_deadline_ms);
    let mut progress = Progress {
        start: None,
        shell_exited: false,
        cause: None,
        timeout: far,
        stuck: now + setup + SETUP_SLACK,
    };
    loop {
        // A reason to stop counts once, and not after the shell's own exit.
        let may_stop = progress.cause.is_none() && !progress.shell_exited;
        tokio::select! {
            biased;
            message = helper.receive() => match message {
                Ok(Some(message)) => {
                    if let Some(finished) = take(message, &mut progress, watch).await? {
                        return Ok(finished);
                    }
                }
                Ok(None) => return Err(Fate::Lost("its helper ended before it reported")),
                Err(error) => {
                    tracing::error!(%error, "a helper's message");
                    return Err(Fate::Lost("its helper could not be understood"));
                }
            },
            () = sleep_until(progress.timeout), if may_stop => end(helper, &mut progress, watch, Cause::Timeout),
            _ = control.stopped(), if may_stop => end(helper, &mut progress, watch, Cause::Abort),
            () = sleep_until(progress.stuck) => return Err(Fate::Lost("its helper did not answer in time and was killed")),
        }
    }
}

/// Asks the helper to end the command, for the first cause only.
fn end(helper: &Helper, progress: &mut Progress, watch: &Watch<'_>, cause: Cause) {
    progress.cause = Some(cause);
    let deployment = &watch.settings.deployment;
    let mut grace = Duration::from_millis(deployment.kill_grace_ms + deployment.drain_grace_ms) + END_SLACK;
    if progress.start.is_none() {
        grace += Duration::from_millis(watch.settings.config.setup_deadline_ms);
    }
    progress.stuck = Instant::now() + grace;
    helper.tell(&ToHelper::Terminate);
}

/// Takes in one message; the report when it was the last.
async fn take(message: FromHelper, progress: &mut Progress, watch: &Watch<'_>) -> Result<Option<Finished>, Fate> {
    let id = watch.events.id;
    match message {
        FromHelper::Started {
            pid,
            unenforced,
            unobserved,
        } if progress.start.is_none() => {
            let now = Instant::now();
            // What runs in the background has no time limit.
            if watch.spec.lifetime == Lifetime::Foreground {
                progress.timeout = now + Duration::from_millis(watch.spec.timeout_ms);
            }
            if progress.cause.is_none() {
                // From here on only the command's own time limit bounds a helper that has nothing to say.
                progress.stuck = progress.timeout + Duration::from_secs(86_400);
            }
            progress.start = Some(Start { unenforced, unobserved });
            let spec = Box::new(watch.spec.clone());
            // A client that is gone shows itself as a reason to stop; one that does not read must not stop the clock.
            let _ = timeout(
                TELL_DEADLINE,
                watch.events.send(&ServerMessage::Started { id, pid, spec }),
            )
            .await;
            watch.gate.send_replace(true);
        }
        FromHelper::Denial(fact) => {
            watch.events.offer(&ServerMessage::Denial { id, fact }, &mut true).await;
        }
        FromHelper::ShellExited(_) => {
            progress.shell_exited = true;
            let deployment = &watch.settings.deployment;
            let graces = Duration::from_millis(deployment.drain_grace_ms + deployment.kill_grace_ms);
            progress.stuck = Instant::now() + graces + END_SLACK;
        }
        FromHelper::Finished(report) => {
            let start = progress.start.take().unwrap_or_default();
            return Ok(Some(Finished {
                report: *report,
                start,
                cause: progress.cause,
            }));
        }
        FromHelper::Failed(failure) => {
            let shell = watch
                .settings
                .shell
                .as_deref()
                .unwrap_or("bash".as_ref())
                .display()
                .to_string();
            return Err(Fate::NotRun(setup_failure(
                watch.spec,
                &shell,
                watch.environment,
                &failure,
            )));
        }
        FromHelper::Started { .. } | FromHelper::Ready { .. } | FromHelper::Probed(_) => {
            return Err(Fate::Lost("its helper spoke out of turn"));
        }
    }
    Ok(None)
}
